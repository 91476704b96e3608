"""What a head is yet to read, and what it has computed: the target's states, and the blocks of its own cache."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from faser.config.speculation import MOST_STATES_READ
from faser.engine.contract.plan import StepRows
from faser.engine.execution.runner.batch import BlockTable

# 19,000 rows of the default model, 2,700 of a model with 4,096 numbers a state; on a GPU four times as many.
CPU_BYTES, GPU_BYTES = 64 << 20, 256 << 20


@dataclass(slots=True)
class StatePiece:
    """States of consecutive positions of one slot. row: number of the first one, counted since the start."""

    row: int
    position: int
    count: int

    @property
    def end(self) -> int:
        return self.position + self.count


class HiddenStates:
    """What the target handed over for a head to read: rows of states, by slot and position.

    A ring of rows, in which every step that captures leaves its rows, over the oldest ones. So memory is bounded
    and nothing is allocated in a step; a slot whose rows were overwritten before the head read them has lost them,
    which is a gap in what its head knows and no error.

        ring    | step 7: rows of slots 0 and 2 | step 8: rows of slot 0 | step 5: overwritten next | step 6 ... |
        slot 0    [   ]                           [                    ]

    Only rows of committed tokens are kept: of γ draft tokens of which a were accepted, the rows of the pending
    token and of the first a draft tokens.

    width: of a row, K * H. num_rows: of the ring; at least as many as a step has.

    most_each: positions of one slot from which on its oldest rows are forgotten.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        most_each: int = MOST_STATES_READ,
    ) -> None:
        self._most_each = most_each
        self._ring = torch.empty((num_rows, width), dtype=dtype, device=device)
        self._next_row = 0
        self._pieces: list[deque[StatePiece] | None] = [None] * num_slots

    def start(self, slot: int) -> None:
        self._pieces[slot] = deque()

    def release(self, slot: int) -> None:
        self._pieces[slot] = None

    def wants(self, slots: Sequence[int]) -> bool:
        """Whether the head may draft for one of these sequences."""
        pieces = self._pieces
        return any(pieces[slot] is not None for slot in slots)

    def take_in(
        self,
        rows: StepRows,
        query_start: Sequence[int],
        states: Tensor,
        num_tokens: Sequence[int],
    ) -> None:
        """A step has computed these rows. query_start: [S], the first row of each sequence in states, [R, K * H].

        num_tokens: [S] how many tokens the step committed: accepted draft tokens and one more, or 0 where it
        failed. The states of refused draft tokens are not kept.
        """
        first_row = self._write(states)
        columns = zip(rows.slots, rows.starts, rows.counts, rows.num_drafts, query_start, num_tokens, strict=False)
        for slot, position, count, num_drafts, start, committed in columns:
            pieces = self._pieces[slot]
            if pieces is None:
                continue
            if num_drafts:
                count -= num_drafts - max(committed - 1, 0)
            while pieces and pieces[-1].end > position:  # a row that is computed again, as it brought no token
                if pieces[-1].position >= position:
                    pieces.pop()
                else:
                    pieces[-1].count = position - pieces[-1].position
            row = first_row + start
            last = pieces[-1] if pieces else None
            if last is not None and last.row + last.count == row and last.end == position:
                last.count += count
            else:
                pieces.append(StatePiece(row, position, count))
                while pieces[0].end <= position + count - self._most_each:
                    pieces.popleft()

    def pieces(self, slot: int, first: int) -> list[StatePiece]:
        """What there is of the slot from position first on, in order; later steps may overwrite it."""
        pieces = self._pieces[slot]
        assert pieces is not None, f"slot {slot} has no states"
        oldest = self._next_row - len(self._ring)
        found = []
        for each in pieces:
            lost = max(oldest - each.row, first - each.position, 0)
            if lost < each.count:
                found.append(
                    StatePiece(each.row + lost, each.position + lost, each.count - lost) if lost else each
                )
        return found

    def forget(self, slot: int, first: int) -> None:
        """The head has read everything before position first, which is that of a row that there is."""
        pieces = self._pieces[slot]
        assert pieces is not None, f"slot {slot} has no states"
        while pieces and pieces[0].end <= first:
            pieces.popleft()
        if pieces and pieces[0].position < first:
            lost = first - pieces[0].position
            pieces[0] = StatePiece(pieces[0].row + lost, first, pieces[0].count - lost)

    def are_there(self, pieces: Sequence[StatePiece]) -> bool:
        """No later step has overwritten a row of these pieces."""
        return all(each.row >= self._next_row - len(self._ring) for each in pieces)

    def gather(self, pieces: Sequence[StatePiece]) -> Tensor:
        """[N, K * H] the rows of these pieces, one after the other; valid until the next step."""
        num_rows = len(self._ring)
        if len(pieces) == 1:
            first = pieces[0].row % num_rows
            if first + pieces[0].count <= num_rows:
                return self._ring[first : first + pieces[0].count]
        numbers = np.concatenate([np.arange(each.row, each.row + each.count) for each in pieces]) % num_rows
        return self._ring.index_select(0, torch.from_numpy(numbers).to(self._ring.device))

    def check_invariants(self) -> None:
        """Raises AssertionError where pieces overlap or lie beyond the ring. Slow: for tests."""
        for pieces in self._pieces:
            for before, after in zip(pieces or (), [*(pieces or ())][1:], strict=False):
                assert before.end <= after.position
                assert before.row + before.count <= after.row
            for each in pieces or ():
                assert each.count > 0
                assert each.row + each.count <= self._next_row

    def _write(self, states: Tensor) -> int:
        """Copy the rows into the ring, next to each other; returns the number of the first one."""
        count, num_rows = len(states), len(self._ring)
        assert count <= num_rows, f"a step has {count} rows, the ring {num_rows}"
        at = self._next_row % num_rows
        if at + count > num_rows:
            self._next_row += num_rows - at
            at = 0
        self._ring[at : at + count].copy_(states)
        first = self._next_row
        self._next_row += count
        return first


def ring_rows(width: int, dtype: torch.dtype, *, max_rows: int, on_gpu: bool) -> int:
    """Rows of a ring within its share of memory, and room for two of the largest steps in any case."""
    budget = GPU_BYTES if on_gpu else CPU_BYTES
    return max(2 * max_rows, budget // (width * dtype.itemsize))


class HeadCache:
    """Which blocks of a head's own KV cache each slot holds, and how many rows the head has computed there.

    A row's place is its number among the rows that the head has computed for the slot, not its position in the
    sequence: so the cache knows nothing of prefixes that others have computed, and a gap in the states leaves no
    hole. Rotary embeddings turn by distance, so only distances across a gap are wrong.

        position   | cached prefix | 40  41  42 ...... 58 | gap | 64 ... 70 |
        row        |               |  0   1   2 ...... 18 |     | 19 ... 25 | draft rows: overwritten by the next

    table: the head's own, with as many slots as the engine's. num_blocks: of its cache.
    """

    def __init__(self, table: BlockTable, *, num_slots: int, num_blocks: int, block_size: int) -> None:
        self.table = table
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_rows = [0] * num_slots

    def num_rows(self, slot: int) -> int:
        """Rows that the head has computed since the slot began anew."""
        return self._num_rows[slot]

    def computed_blocks(self, slot: int) -> list[int]:
        """The blocks of these rows."""
        return self.table.blocks(slot)[: -(-self._num_rows[slot] // self._block_size)]

    def set_rows(self, slot: int, num_rows: int) -> None:
        """The first num_rows places of the slot are rows of committed tokens."""
        self._num_rows[slot] = num_rows

    def reserve(self, slot: int, num_places: int) -> bool:
        """Let the slot hold blocks for this many places; False and unchanged where too few are free."""
        wanted = -(-num_places // self._block_size) - len(self.table.blocks(slot))
        if wanted <= 0:
            return True
        if wanted > len(self._free):
            return False
        self.table.append(slot, tuple([self._free.pop() for _ in range(wanted)]))
        return True

    def begin_anew(self, slot: int) -> None:
        """Give all blocks of the slot back: nothing of it is computed."""
        self._free.extend(reversed(self.table.blocks(slot)))
        self.table.clear(slot)
        self._num_rows[slot] = 0

    def check_invariants(self) -> None:
        """Raises AssertionError unless every block is free or held by one slot that has room. Slow: for tests."""
        held = [block for slot in range(len(self._num_rows)) for block in self.table.blocks(slot)]
        assert sorted([*held, *self._free]) == list(range(self._num_blocks))
        for slot, num_rows in enumerate(self._num_rows):
            assert num_rows <= len(self.table.blocks(slot)) * self._block_size
