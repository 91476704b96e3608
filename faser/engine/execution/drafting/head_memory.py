"""Memory of a head: the target's states that it is yet to read, and the places of its KV cache."""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.config.speculation import MOST_STATES_READ, PROMPT_ROWS
from faser.engine.contract.plan import StepRows
from faser.engine.execution.drafting.block_marks import BlockMarks, MarkedLine
from faser.engine.execution.runner.batch import BlockTable

# 19,000 rows of the default model, 2,700 of a model with 4,096 numbers a state; on a GPU four times as many.
CPU_BYTES, GPU_BYTES = 64 << 20, 256 << 20

UNKNOWN = -1


@dataclass(slots=True)
class StatePiece:
    """States of consecutive positions of one slot. row: number of the first one, counted since the start.

    row UNKNOWN: of states that there never were.
    """

    row: int
    position: int
    count: int

    @property
    def end(self) -> int:
        return self.position + self.count

    def rows(self) -> NDArray[np.int64]:
        return np.full(self.count, UNKNOWN) if self.row == UNKNOWN else np.arange(self.row, self.row + self.count)


class NoHiddenStates:
    """Stands in for HiddenStates where no head reads what the target computes."""

    def wants(self, _: Sequence[int]) -> bool:
        return False

    def take_in(self, *_: object) -> None:
        """No state is kept."""


class HiddenStates:
    """States that the target handed over for a head to read: rows by slot and position.

    A ring of rows, in which every step that captures leaves its rows, over the oldest ones. So memory is bounded
    and nothing is allocated in a step; a slot whose rows were overwritten before the head read them has lost them,
    which is a gap in what its head knows and no error.

        ring    | step 7: rows of slots 0 and 2 | step 8: rows of slot 0 | step 5: overwritten next | step 6 ... |
        slot 0    [   ]                           [                    ]

    Only rows of committed tokens are kept: of γ draft tokens of which a were accepted, the rows of the pending
    token and of the first a draft tokens.

    width: of a row, K * H. num_rows: of the ring; at least as many as a step has. most_each: positions of one slot
    from which on its oldest rows are forgotten. prompt_rows: of a slot in one step, from which take_full tells it.
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
        prompt_rows: int = PROMPT_ROWS,
    ) -> None:
        self._most_each, self._prompt_rows = most_each, prompt_rows
        self._ring = torch.empty((num_rows, width), dtype=dtype, device=device)
        self._next_row = 0
        self._full: set[int] = set()
        self._pieces: list[deque[StatePiece] | None] = [None] * num_slots

    def start(self, slot: int) -> None:
        self._pieces[slot] = deque()

    def release(self, slot: int) -> None:
        self._pieces[slot] = None
        self._full.discard(slot)

    def wants(self, slots: Sequence[int]) -> bool:
        """Return whether the head may draft for one of these sequences."""
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
            if count >= self._prompt_rows:
                self._full.add(slot)

    def take_full(self) -> set[int]:
        """Return the slots of which a step has left rows of a prompt, since the last call."""
        full, self._full = self._full, set()
        return full

    def pieces(self, slot: int, first: int) -> list[StatePiece]:
        """Return what there is of the slot from position first on, in order; later steps may overwrite it."""
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
        return all(each.row == UNKNOWN or each.row >= self._next_row - len(self._ring) for each in pieces)

    def gather(self, pieces: Sequence[StatePiece]) -> Tensor:
        """Return the rows [N, K * H] of these pieces, 0 where they are UNKNOWN; valid until the next step."""
        num_rows = len(self._ring)
        if len(pieces) == 1 and pieces[0].row != UNKNOWN:
            first = pieces[0].row % num_rows
            if first + pieces[0].count <= num_rows:
                return self._ring[first : first + pieces[0].count]
        numbers = self.numbers(pieces)
        found = self._ring.index_select(0, torch.from_numpy(numbers % num_rows).to(self._ring.device))
        if (unknown := np.flatnonzero(numbers == UNKNOWN)).size:
            found[torch.from_numpy(unknown).to(found.device)] = 0
        return found

    @property
    def ring(self) -> Tensor:
        """Return the memory [N, K * H] of all rows, which stays in place."""
        return self._ring

    def numbers(self, pieces: Sequence[StatePiece]) -> NDArray[np.int64]:
        """Return the rows of the ring with these states, or UNKNOWN; valid until the next step."""
        numbers = np.concatenate([each.rows() for each in pieces])
        return np.where(numbers == UNKNOWN, UNKNOWN, numbers % len(self._ring))

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


class BlockViews(BlockTable):
    """A block table whose slots may leave out their first blocks: places count from the first one that is seen."""

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._firsts = np.zeros(table.num_slots, dtype=np.int64)

    def first(self, slot: int) -> int:
        """Return how many blocks the slot leaves out."""
        return self._firsts.item(slot)

    def leave_out(self, slot: int, num_blocks: int) -> None:
        self._firsts[slot] = num_blocks

    def blocks(self, slot: int, first: int = 0) -> list[int]:
        return self._table.blocks(slot, self.first(slot) + first)

    def num_blocks(self, slots: Sequence[int]) -> NDArray[np.int32]:
        return (self._table.num_blocks(slots) - self._firsts[slots]).astype(np.int32)

    def of(self, slots: list[int]) -> Tensor:
        table, firsts = self._table.of(slots), self._firsts[slots]
        if not firsts.any():
            return table
        columns = np.minimum(np.arange(table.shape[1]) + firsts[:, None], table.shape[1] - 1)
        return table.gather(1, torch.from_numpy(columns))

    def adapters(self, _slots: list[int]) -> None:
        """Return None: a head has no adapters."""


class HeadLine(MarkedLine):
    """One slot. token_ids: all known ones. num_prompt: of these, when the sequence started.

    num_new: tokens that the last step committed. computed: the position up to which the cache has rows. adopted:
    blocks that were filled before this sequence started have been looked for. apart: its rows are its own alone.
    read: of each piece of states that the head has read, the row, position and count.
    """

    __slots__ = ("adopted", "apart", "computed", "num_new", "num_prompt", "read")

    def __init__(self, token_ids: Sequence[int]) -> None:
        super().__init__(token_ids)
        self.num_prompt = len(token_ids)
        self.num_new = 1
        self.computed = 0
        self.adopted = False
        self.apart = False
        self.read = array("q")


class HeadCache:
    """Contents of a head's cache: rows of committed tokens in the target's blocks (block_marks.py).

    A row's place is the position of the state that it reads. A head's row is that of the token behind it, so
    the last row of a block may be another token's: of the sequence that filled it.

        position   | 0 ....... adopted blocks | own rows ....... computed | draft rows: overwritten by the next

    Where states are missing between the adopted blocks and those that there are, the head leaves the blocks before
    out, and rows of the block before the first known state read UNKNOWN ones. Then places count from the first
    block that it sees: rotary embeddings turn by distance. Such rows are for their own sequence alone.
    """

    def __init__(self, table: BlockTable, *, num_blocks: int, block_size: int) -> None:
        self.table = BlockViews(table)
        self.block_size = block_size
        self._marks = BlockMarks(table, num_blocks=num_blocks, block_size=block_size)
        self._lines: dict[int, HeadLine] = {}

    def start(self, slot: int, token_ids: Sequence[int]) -> HeadLine:
        self.table.leave_out(slot, 0)
        self._lines[slot] = line = HeadLine(token_ids)
        return line

    def release(self, slot: int) -> None:
        self._lines.pop(slot, None)

    def place(self, slot: int, position: int) -> int:
        """Return the place of a position in what the slot sees of its blocks."""
        return position - self.table.first(slot) * self.block_size

    def room(self, slot: int) -> int:
        """Positions that the slot's blocks have."""
        return (self.table.first(slot) + len(self.table.blocks(slot))) * self.block_size

    def begin(self, slot: int, last: int) -> int:
        """The first position that a row has to be computed for, so that there is one for position last."""
        line = self._lines[slot]
        if not line.adopted:
            line.computed, line.adopted = self._marks.adopt(slot, line), True
        return min(line.computed, last)

    def leave_out(self, slot: int, position: int) -> list[StatePiece]:
        """Leave the blocks before this position's out of view. position: of the first known state.

        Returns the states to read for the rows of this block before it.
        """
        line, begin = self._lines[slot], position // self.block_size * self.block_size
        line.apart, line.read = True, array("q")
        self.table.leave_out(slot, begin // self.block_size)
        return [StatePiece(UNKNOWN, begin, position - begin)] if position > begin else []

    def write(self, slot: int, begin: int) -> None:
        """The head is about to compute rows from this position on."""
        self._marks.clear(slot, self._lines[slot], begin)

    def fill(self, slot: int, pieces: Sequence[StatePiece]) -> None:
        """The rows that read these states are computed."""
        line = self._lines[slot]
        for each in pieces:
            line.read.extend((each.row, each.position, each.count))
        line.computed = pieces[-1].end
        if not line.apart:
            self._marks.mark(slot, line, line.computed)

    def own_rows(self, slot: int) -> list[StatePiece]:
        """The states of the rows that the sequence has computed, in order; once where they were computed twice."""
        line = self._lines[slot]
        found: list[StatePiece] = []
        end = line.computed
        for row, position, count in np.array(line.read).reshape(-1, 3)[::-1].tolist():
            if position < end:
                found.append(StatePiece(row, position, min(count, end - position)))
                end = position
        return found[::-1]

    def blocks(self, slot: int, begin: int) -> list[int]:
        """The blocks of the computed rows from this position on."""
        first, size = self.table.first(slot), self.block_size
        return self.table.blocks(slot)[begin // size - first : -(-self._lines[slot].computed // size) - first]

    def distrust(self) -> None:
        """Rows have had to be computed again: so must what no sequence holds."""
        self._marks.keep(self._lines)

    def check_invariants(self) -> None:
        """Raises AssertionError where rows, blocks and marks disagree. Slow: for tests."""
        for slot, line in self._lines.items():
            assert 0 <= line.computed <= min(len(line.token_ids), self.room(slot))
            assert not line.read or line.read[1] >= self.table.first(slot) * self.block_size
            self._marks.check_invariants(slot, line)
