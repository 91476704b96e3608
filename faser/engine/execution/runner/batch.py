"""The data plane's picture of its sequences: which blocks each slot holds, and the rows of one step as arrays.

Owns the block table. Knows nothing of models, sampling or why a sequence runs.
"""

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from faser.engine.contract.plan import SequenceRows
from faser.engine.execution.sampling.token_samplers import PendingTokens
from faser.kernels.interface.backend import RowLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFeedback:
    """Inputs of rows that are still being chosen. rows: [F] of the batch; sources: [F] tokens of the choice.

    pending: the last choice of the runner that the batch is for. What could not be chosen is fed as token 0: the
    sequence ends with an error anyway.
    """

    pending: PendingTokens
    rows: NDArray[np.int64]
    sources: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """The rows of one step.

    token_ids: [R] int64, anything at rows that are fed. last_rows: [S] for each sequence of the plan, the index of
    its last row. feed: None where all inputs are known.
    """

    token_ids: torch.Tensor
    layout: RowLayout
    last_rows: NDArray[np.int64]
    feed: TokenFeedback | None = None

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    def narrowed(self, counts: NDArray[np.int32]) -> tuple["RowBatch", NDArray[np.int64]]:
        """The batch of each sequence's first counts[s] rows, [S], at least one; and which these are, ascending.

        rows     | a0 a1 a2 a3 | b0 | c0 c1 |    counts 2, 1, 2    rows that stay 0, 1, 4, 5, 6
        """
        starts = self.layout.query_start.numpy()
        owned = np.diff(starts)
        assert ((counts >= 1) & (counts <= owned)).all(), f"{counts} rows are to stay of {owned}"
        query_start = np.zeros_like(starts)
        np.cumsum(counts, out=query_start[1:])
        staying = np.arange(query_start[-1], dtype=np.int64) + np.repeat(starts[:-1] - query_start[:-1], counts)
        batch = RowBatch(
            token_ids=self.token_ids[torch.from_numpy(staying)],
            layout=RowLayout(
                query_start=torch.from_numpy(query_start),
                seq_len=self.layout.seq_len - torch.from_numpy(owned - counts.astype(owned.dtype)),
                positions=self.layout.positions[torch.from_numpy(staying)],
                block_table=self.layout.block_table,
            ),
            last_rows=query_start[1:].astype(np.int64) - 1,
        )
        return batch, staying


class BlockTable:
    """Blocks of every slot, in order of position. [num_slots, max_blocks] int32, allocated once."""

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        self._blocks = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self._lists: list[list[int]] = [[] for _ in range(num_slots)]  # the same, where one is asked for at a time

    def clear(self, slot: int) -> None:
        self._lists[slot] = []

    def append(self, slot: int, blocks: tuple[int, ...]) -> None:
        held = self._lists[slot]
        self._blocks[slot, len(held) : len(held) + len(blocks)] = blocks
        held.extend(blocks)

    def blocks(self, slot: int, first: int = 0) -> list[int]:
        """Blocks of a slot, in order of position, from number first on."""
        return self._lists[slot][first:]

    def gather(self, rows: tuple[SequenceRows, ...]) -> RowBatch:
        """Lay the rows of one plan out as arrays; their new blocks must have been appended."""
        inputs = [each.token_ids for each in rows]
        return self.lay_out(
            [each.slot for each in rows],
            np.array([each.start for each in rows], dtype=np.int32),
            np.array([*map(len, inputs)], dtype=np.int32),
            np.fromiter(chain.from_iterable(inputs), np.int64),
        )

    def lay_out(
        self,
        slots: list[int],
        starts: NDArray[np.int32],
        counts: NDArray[np.int32],
        token_ids: NDArray[np.int64],
    ) -> RowBatch:
        """Rows at positions starts[s], starts[s] + 1, … of slot s, counts[s] of them; token_ids: of all."""
        query_start = np.zeros(len(slots) + 1, dtype=np.int32)
        counts.cumsum(out=query_start[1:])
        positions = np.arange(len(token_ids), dtype=np.int32)
        positions += (starts - query_start[:-1]).repeat(counts)
        width = max([len(self._lists[slot]) for slot in slots])
        return RowBatch(
            token_ids=torch.from_numpy(token_ids),
            layout=RowLayout(
                query_start=torch.from_numpy(query_start),
                seq_len=torch.from_numpy(starts + counts),
                positions=torch.from_numpy(positions),
                block_table=torch.from_numpy(self._blocks[slots, :width]),
            ),
            last_rows=query_start[1:].astype(np.int64) - 1,
        )
