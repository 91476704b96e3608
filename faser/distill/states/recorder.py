"""record: runs a target over the conversations of a dataset and keeps its states, shard by shard."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from faser.distill.conversations.dataset import Dataset
from faser.distill.conversations.shard import Conversation
from faser.distill.states.state_files import StateFolder
from faser.distill.states.target_states import Passage, PassageStates, TargetStates, batches

Report = Callable[[str, int, int], None]  # (stage, tokens done, tokens in all)


def record(dataset: Dataset, target: TargetStates, folder: StateFolder, report: Report) -> None:
    """Add the shards that the folder lacks. Raises ConfigError where the disk has no room for them."""
    missing = dataset.records[folder.num_shards :]
    total = sum(each.prompt_tokens + each.answer_tokens for each in missing)
    if not missing:
        return
    folder.check_room(total)
    done = 0
    place = sum(each.conversations for each in dataset.records[: folder.num_shards])
    for index in range(folder.num_shards, len(dataset.records)):
        conversations = list(dataset.shard(index))
        fitted = [fitted_passage(each, target.max_rows) for each in conversations]
        found: list[PassageStates] = []
        for part in batches([len(each.token_ids) for each in fitted], target.max_rows):
            found += target.compute([fitted[at] for at in part])
            done += sum(len(fitted[at].token_ids) for at in part)
            report("states", min(done, total), total)
        folder.add(found, shard_arrays(conversations, fitted, place))
        place += len(conversations)


def shard_arrays(
    conversations: Sequence[Conversation], fitted: Sequence[Passage], place: int
) -> dict[str, npt.NDArray[Any]]:
    """What a shard says of its conversations beside states and distributions. place: of the first one."""
    return {
        "token_ids": torch.cat([each.token_ids for each in fitted]).numpy().astype(np.int32),
        "starts": np.concatenate(([0], np.cumsum([len(each.token_ids) for each in fitted]))),
        "prompts": np.array([each.first_row for each in fitted], dtype=np.int64),
        "greedy": np.array([each.temperature == 0 for each in conversations]),
        "places": np.arange(place, place + len(conversations)),
    }


def fitted_passage(conversation: Conversation, most: int) -> Passage:
    """At most `most` tokens: of more the prompt loses its start, then the answer its end."""
    answer: Sequence[int] = conversation.answer[: most - 1]
    prompt: Sequence[int] = conversation.prompt[max(0, len(conversation.prompt) + len(answer) - most) :]
    return Passage(token_ids=torch.tensor([*prompt, *answer], dtype=torch.int64), first_row=len(prompt))
