"""States of a target for a dataset: recorded shard by shard, kept on disk, mapped into memory when read.

    states.json        how they were made, and which shards are there
    00000.states       bfloat16 [rows of all conversations of the shard, K * H]
    00000.npz          starts and prompts of the conversations; top_ids and top_probs of their answers

A shard counts from the moment states.json lists it.
"""

import json
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from faser.config.declaration import show_bytes
from faser.distill.dataset import Dataset, RecordedConversation, unwritable
from faser.distill.target import Passage, PassageStates, TargetStates, batches
from faser.errors import ConfigError
from faser.files import parse_json, replacing, write_atomically
from faser.types.engine import ProgressCallback

_INDEX = "states.json"
_KEPT_FREE = 256 << 20  # bytes of the disk that are left to others


class ShardStates:
    """One shard, read. Conversation i has rows starts[i] … starts[i + 1] - 1 of states and token_ids.

    states: [T, K * H] bfloat16, mapped. token_ids: [T] int32. prompts: [N] int64, prompt tokens. tops: [N + 1]:
    its distributions are rows tops[i] … tops[i + 1] - 1 of top_ids and top_probs. greedy, places: [N], whether it
    was answered at temperature 0, and its place in the dataset.
    """

    def __init__(self, states: Tensor, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self.states = states
        self.token_ids = arrays["token_ids"]
        self.starts = arrays["starts"]
        self.prompts = arrays["prompts"]
        self.greedy = arrays["greedy"]
        self.places = arrays["places"]
        self.top_ids = arrays["top_ids"]
        self.top_probs = arrays["top_probs"]
        counts = np.maximum(np.diff(self.starts) - 1 - self.prompts, 0)
        self.tops = np.concatenate(([0], counts.cumsum()))

    def __len__(self) -> int:
        return len(self.prompts)


class StateFolder:
    """The states of one target. settings: as JSON; others than those on disk are refused with ConfigError."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], width: int) -> None:
        self.folder = folder
        self.width = width
        self._settings = dict(settings)
        self.num_shards = 0
        index = folder / _INDEX
        if index.exists():
            try:
                stored = parse_json(index.read_text(encoding="utf-8"))
                self.num_shards, found = int(stored["shards"]), dict(stored["settings"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{index} cannot be read: {error}") from None
            for name, value in self._settings.items():
                if found.get(name) != value:
                    raise ConfigError(
                        f"{index} was made with {name} {json.dumps(found.get(name))}, not {json.dumps(value)}: "
                        f"remove {folder}, or give the same flags"
                    )

    def check_room(self, rows: int) -> None:
        """Raises ConfigError unless the disk has room for the states of this number of tokens."""
        needed = rows * self.width * torch.bfloat16.itemsize + _KEPT_FREE
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            raise unwritable(self.folder, error) from None
        if free < needed:
            raise ConfigError(
                f"{self.folder} needs {show_bytes(needed)} for the states of {rows} tokens, and the disk has "
                f"{show_bytes(free)} left: free some, give another folder with -o, or lower --tokens"
            )

    def add(self, found: list[PassageStates], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write the next shard. arrays: token_ids, starts, prompts, greedy, places."""
        states, rest = self._paths(self.num_shards)
        try:
            with replacing(states) as path, path.open("wb") as file:
                for each in found:
                    file.write(each.states.contiguous().view(torch.int16).numpy().tobytes())
            with replacing(rest) as path, path.open("wb") as file:
                tops = {
                    name: torch.cat([getattr(each, name) for each in found]) for name in ("top_ids", "top_probs")
                }
                np.savez(file, **(dict(arrays) | {name: each.numpy() for name, each in tops.items()}))  # type: ignore[arg-type]
            stored = {"settings": self._settings, "shards": self.num_shards + 1}
            write_atomically(self.folder / _INDEX, json.dumps(stored, indent=1) + "\n")
        except OSError as error:
            raise unwritable(self.folder, error) from None
        self.num_shards += 1

    def shard(self, index: int) -> ShardStates:
        """Raises ConfigError that names a file that is missing or damaged."""
        states, rest = self._paths(index)
        try:
            with rest.open("rb") as file, np.load(file, allow_pickle=False) as found:
                arrays = {name: found[name] for name in found.files}
            rows = int(arrays["starts"][-1])
            if states.stat().st_size != rows * self.width * torch.bfloat16.itemsize:
                raise ConfigError(
                    f"{states} has {states.stat().st_size} bytes; {rows} rows of {self.width} need others"
                )
            mapped = torch.from_file(str(states), shared=False, size=rows * self.width, dtype=torch.bfloat16)
            return ShardStates(mapped.view(rows, self.width), arrays)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise ConfigError(f"{rest} cannot be read: {error}; remove {self.folder} to make it anew") from None

    def _paths(self, index: int) -> tuple[Path, Path]:
        return self.folder / f"{index:05d}.states", self.folder / f"{index:05d}.npz"


def record(dataset: Dataset, target: TargetStates, folder: StateFolder, report: ProgressCallback) -> None:
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
    conversations: Sequence[RecordedConversation], fitted: Sequence[Passage], place: int
) -> dict[str, npt.NDArray[Any]]:
    """Return a shard's arrays next to states and distributions. place: of the first conversation."""
    return {
        "token_ids": torch.cat([each.token_ids for each in fitted]).numpy().astype(np.int32),
        "starts": np.concatenate(([0], np.cumsum([len(each.token_ids) for each in fitted]))),
        "prompts": np.array([each.first_row for each in fitted], dtype=np.int64),
        "greedy": np.array([each.temperature == 0 for each in conversations]),
        "places": np.arange(place, place + len(conversations)),
    }


def fitted_passage(conversation: RecordedConversation, most: int) -> Passage:
    """At most `most` tokens: of more the prompt loses its start, then the answer its end."""
    answer: Sequence[int] = conversation.answer[: most - 1]
    prompt: Sequence[int] = conversation.prompt[max(0, len(conversation.prompt) + len(answer) - most) :]
    return Passage(token_ids=torch.tensor([*prompt, *answer], dtype=torch.int64), first_row=len(prompt))
