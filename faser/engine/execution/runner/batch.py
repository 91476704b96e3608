"""The rows of a step as arrays, and the block table: which KV blocks each slot holds, in order of position.

Knows nothing of models, of sampling, or why a sequence runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from faser.engine.contract.plan import NO_ADAPTER, StepRows
from faser.kernels.interface.sampling import SamplingMetadata
from faser.kernels.interface.shapes import RowLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFeedback:
    """Device-side token feedback: input tokens that are still being sampled when the batch is launched.

    tokens: [N] int64 on the device: the last ones that the batch's own runner has sampled, or what others feed it.
    rows: [F] row numbers in the batch. sources: [F] indices into tokens. NO_TOKEN enters as token 0: its sequence
    ends with an error anyway, or the draft with another token.
    """

    tokens: torch.Tensor
    rows: NDArray[np.int64]
    sources: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """The rows of one step.

    token_ids: [R] int64, arbitrary at rows that get their token by feedback. last_rows: [S], the number of each
    sequence's last row, in plan order. feedback: None: all tokens are known. captures: a head wants the states of
    these rows.
    """

    token_ids: torch.Tensor
    layout: RowLayout
    last_rows: NDArray[np.int64]
    feedback: TokenFeedback | None = None
    captures: bool = False

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    def compact(self, counts: NDArray[np.int32]) -> tuple["RowBatch", NDArray[np.int64]]:
        """The batch of each sequence's first counts[s] rows, [S], at least one; and their old numbers, ascending.

        rows     | a0 a1 a2 a3 | b0 | c0 c1 |    counts 2, 1, 2    kept rows 0, 1, 4, 5, 6
        """
        starts = self.layout.query_start.numpy()
        owned = np.diff(starts)
        assert ((counts >= 1) & (counts <= owned)).all(), f"{counts} rows are to be kept of {owned}"
        query_start = np.zeros_like(starts)
        np.cumsum(counts, out=query_start[1:])
        kept = np.arange(query_start[-1], dtype=np.int64) + np.repeat(starts[:-1] - query_start[:-1], counts)
        batch = RowBatch(
            token_ids=self.token_ids[torch.from_numpy(kept)],
            layout=RowLayout(
                query_start=torch.from_numpy(query_start),
                seq_len=self.layout.seq_len - torch.from_numpy(owned - counts.astype(owned.dtype)),
                positions=self.layout.positions[torch.from_numpy(kept)],
                block_table=self.layout.block_table,
                slots=self.layout.slots,
                adapters=self.layout.adapters,
            ),
            last_rows=query_start[1:].astype(np.int64) - 1,
            captures=self.captures,
        )
        return batch, kept


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuedDrafts:
    """D drafts whose further passes have one row each, over the tokens sampled last.

    slots: [D]. places: [D] of the rows of the next pass. shifts: [D] by how much positions of tokens exceed the
    places of their rows. num_passes: most of them. requests: [D] what the sequences ask for, at any positions.
    """

    slots: list[int]
    places: NDArray[np.int64]
    shifts: NDArray[np.int64]
    num_passes: int
    requests: SamplingMetadata


class BlockTable:
    """Blocks of every slot, in order of position: [num_slots, max_blocks] int32, allocated once; and adapters."""

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        self._blocks = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self._lists: list[list[int]] = [[] for _ in range(num_slots)]  # the same, for look-ups of one slot
        self._adapters = np.full(num_slots, NO_ADAPTER, dtype=np.int32)
        self._adapts = False  # since a slot had one

    @property
    def num_slots(self) -> int:
        return len(self._lists)

    def clear(self, slot: int) -> None:
        """Empty a slot: it has no blocks and no adapter."""
        self._lists[slot] = []
        self.set_adapter(slot, NO_ADAPTER)

    def set_adapter(self, slot: int, adapter: int) -> None:
        """Give all rows of a slot an adapter, by the number of its adapter slot, until it is cleared."""
        self._adapters[slot] = adapter
        self._adapts |= adapter != NO_ADAPTER

    def adapters(self, slots: list[int]) -> torch.Tensor | None:
        """Return the adapter slot of each slot: [S] int32; None: none of them has one."""
        if not self._adapts:
            return None
        found = self._adapters[slots]
        return torch.from_numpy(found) if (found != NO_ADAPTER).any() else None

    def append(self, slot: int, blocks: tuple[int, ...]) -> None:
        held = self._lists[slot]
        self._blocks[slot, len(held) : len(held) + len(blocks)] = blocks
        held.extend(blocks)

    def blocks(self, slot: int, first: int = 0) -> list[int]:
        """Blocks of a slot, in order of position, without the first `first`."""
        return self._lists[slot][first:]

    def num_blocks(self, slots: Sequence[int]) -> NDArray[np.int32]:
        """Return how many blocks each slot holds: [S]."""
        return np.array([len(self._lists[slot]) for slot in slots], dtype=np.int32)

    def of(self, slots: list[int]) -> torch.Tensor:
        """Return the blocks of each slot: [S, B] int32, arbitrary behind its last one."""
        width = max([len(self._lists[slot]) for slot in slots])
        return torch.from_numpy(self._blocks[slots, :width])

    def gather(self, rows: StepRows) -> RowBatch:
        """The rows of one plan as arrays. Append their new blocks first."""
        return self.lay_out(
            rows.slots,
            np.array(rows.starts, dtype=np.int32),
            np.array(rows.counts, dtype=np.int32),
            np.array(rows.token_ids, dtype=np.int64),
            num_drafts=rows.num_drafts,
        )

    def lay_out(
        self,
        slots: list[int],
        starts: NDArray[np.int32],
        counts: NDArray[np.int32],
        token_ids: NDArray[np.int64],
        *,
        num_drafts: Sequence[int] = (),
    ) -> RowBatch:
        """counts[s] rows of slots[s], at positions starts[s], starts[s] + 1, …; token_ids: of all rows."""
        query_start = np.zeros(len(slots) + 1, dtype=np.int32)
        counts.cumsum(out=query_start[1:])
        positions = np.arange(len(token_ids), dtype=np.int32)
        positions += (starts - query_start[:-1]).repeat(counts)
        return RowBatch(
            token_ids=torch.from_numpy(token_ids),
            layout=RowLayout(
                query_start=torch.from_numpy(query_start),
                seq_len=torch.from_numpy(starts + counts),
                positions=torch.from_numpy(positions),
                block_table=self.of(slots),
                slots=slots,
                adapters=self.adapters(slots),
                num_drafts=num_drafts,
            ),
            last_rows=query_start[1:].astype(np.int64) - 1,
        )
