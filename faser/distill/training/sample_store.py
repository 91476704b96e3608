"""SampleStore: recorded conversations as samples for one head, and the order in which they are learned."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from faser.distill.states.state_files import ShardStates
from faser.distill.training.batch import Sample

_POOL = 256  # conversations that are sorted by length together, so that batches have little padding


class SampleStore:
    """The conversations of some shards that have rows to learn, in order.

    draft_ids: [Vd] int64, the target's token of each row of the head. keeps: chooses conversations by their place
    in the dataset.
    """

    def __init__(
        self, shards: Sequence[ShardStates], draft_ids: Tensor, vocab_size: int, keeps: Callable[[int], bool]
    ) -> None:
        self._rows = torch.full((vocab_size,), -1, dtype=torch.int64)
        self._rows[draft_ids] = torch.arange(len(draft_ids))
        self._found = [
            (shard, at)
            for shard in shards
            for at in range(len(shard))
            if keeps(int(shard.places[at])) and shard.tops[at + 1] > shard.tops[at]
        ]

    def __len__(self) -> int:
        return len(self._found)

    @property
    def drafting_rows(self) -> list[int]:
        """Rows to learn from, by conversation."""
        return [int(shard.tops[at + 1] - shard.tops[at]) for shard, at in self._found]

    def sample(self, index: int) -> Sample:
        shard, at = self._found[index]
        first, last = int(shard.starts[at]), int(shard.starts[at + 1])
        return Sample(
            token_ids=torch.from_numpy(shard.token_ids[first:last].astype(np.int64)),
            prompt_tokens=int(shard.prompts[at]),
            states=shard.states[first : last - 1],
            greedy=bool(shard.greedy[at]),
            **self._wanted(shard, at),
        )

    def _wanted(self, shard: ShardStates, at: int) -> dict[str, Tensor]:
        part = slice(int(shard.tops[at]), int(shard.tops[at + 1]))
        rows = self._rows[torch.from_numpy(shard.top_ids[part].astype(np.int64))]
        probs = torch.from_numpy(shard.top_probs[part].astype(np.float32))
        return {"top_ids": rows.clamp_min(0), "top_probs": probs * (rows >= 0)}


def batches_of_epoch(drafting_rows: Sequence[int], *, rows: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices of conversations, in batches of about `rows` drafting rows, in an order that seed and epoch fix."""
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(drafting_rows))
    found: list[list[int]] = []
    for first in range(0, len(order), _POOL):
        pool = sorted(order[first : first + _POOL].tolist(), key=lambda index: drafting_rows[index])
        batch: list[int] = []
        held = 0
        for index in pool:
            if batch and held + drafting_rows[index] > rows:
                found.append(batch)
                batch, held = [], 0
            batch.append(index)
            held += drafting_rows[index]
        found.append(batch)
    return [found[at] for at in rng.permutation(len(found))]
