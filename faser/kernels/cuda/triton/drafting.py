"""The kernels between a verification and the passes that draft behind it: what was accepted, and where rows are.

Both work on a few numbers of each sequence, in one program for each. So no pass waits until the host has read how
many draft tokens were accepted.
"""

from typing import Protocol

import triton.language as tl
from torch import Tensor

from faser.config.speculation import MAX_DRAFT_TOKENS
from faser.kernels.cuda.triton.common import jit, jit_for_any, next_power_of_2
from faser.kernels.interface.drafting import FollowedRows, StepMatch

_MOST_ROWS = next_power_of_2(MAX_DRAFT_TOKENS + 1)  # of one sequence


@jit
def _match(sampled, drafted, decided, fed, first, known, match_counts, last, MOST: tl.constexpr):
    """One sequence: its rows up to the first whose draft token is not the sampled one."""
    sequence = tl.program_id(0)
    begin, end = tl.load(first + sequence), tl.load(first + sequence + 1)
    depth = tl.arange(0, MOST)
    inside = begin + depth < end
    chosen = tl.load(sampled + begin + depth, mask=inside, other=-1)
    wanted = tl.load(drafted + begin + depth, mask=inside, other=-1)
    is_fed = wanted < -1
    drawn = tl.load(fed + (-2 - wanted), mask=is_fed, other=0)
    wanted = tl.where(is_fed, tl.where(drawn < 0, 0, drawn), wanted)  # a draft without numbers is token 0
    verdict = tl.load(decided + begin + depth, mask=inside, other=0)
    refused = tl.where(verdict < 0, chosen != wanted, verdict == 0) | (wanted < 0)
    accepted = tl.min(tl.where(refused, depth, MOST), axis=0)
    newest = tl.sum(tl.where(depth == accepted, chosen, 0), axis=0)
    before = tl.sum(tl.where(depth == accepted - 1, wanted, 0), axis=0)
    before = tl.where(accepted == 0, tl.load(known + sequence), before)
    tl.store(match_counts + sequence, accepted + 1)
    tl.store(last + 2 * sequence, tl.maximum(before, 0))
    tl.store(last + 2 * sequence + 1, tl.maximum(newest, 0))


def match(step: StepMatch) -> None:
    """Fill counts and last of the step, whose sequences have up to MAX_DRAFT_TOKENS draft tokens each."""
    _match[(len(step.counts),)](
        step.sampled, step.drafted, step.decided, step.fed, step.first, step.known, step.counts, step.last,
        MOST=_MOST_ROWS, num_warps=1,
    )  # fmt: skip


@jit_for_any("width")
def _advance(
    numbers, width, match_counts, last, lengths, fed, row_positions, page_starts, pages, seq_len, last_page_len,
    positions, slots, FIRST: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """One row. Beyond the blocks that its sequence has, it stores nothing, and reads no further."""
    row = tl.program_id(0)
    rows_each: tl.constexpr = 2 if FIRST else 1
    if row < tl.load(numbers) * rows_each:
        draft = row // rows_each
        if FIRST:
            at = tl.load(numbers + 1 + width + draft)
            known = tl.load(numbers + 1 + draft) + tl.load(match_counts + at)
            length = known - 1 + row % 2
            tl.store(fed + row, tl.load(last + 2 * at + row % 2))
        else:
            known = tl.load(lengths + draft) + 1
            length = known
        if row % rows_each == rows_each - 1:
            tl.store(lengths + draft, known)
            tl.store(row_positions + draft, known + tl.load(numbers + 1 + 2 * width + draft))
        begin = tl.load(page_starts + row)
        num_pages = tl.load(page_starts + row + 1) - begin
        fits = length <= num_pages * BLOCK_SIZE
        length = tl.minimum(length, (num_pages * BLOCK_SIZE).to(tl.int64))
        place = length - 1
        page = tl.load(pages + begin + place // BLOCK_SIZE).to(tl.int64)
        tl.store(seq_len + row, length.to(tl.int32))
        tl.store(last_page_len + row, (length - (num_pages - 1) * BLOCK_SIZE).to(tl.int32))
        tl.store(positions + row, place)
        tl.store(slots + row, tl.where(fits, page * BLOCK_SIZE + place % BLOCK_SIZE, -1))


class PlacedRows(Protocol):
    """The index arrays of a layout in which every row is a sequence; see flashinfer/paged_layout.py."""

    @property
    def page_indptr(self) -> Tensor: ...
    @property
    def page_indices(self) -> Tensor: ...
    @property
    def seq_len(self) -> Tensor: ...
    @property
    def last_page_len(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def slots(self) -> Tensor: ...


def advance(rows: FollowedRows, step: StepMatch | None, layout: PlacedRows, block_size: int) -> None:
    """Move the rows of a layout on the device to where the next pass of the drafts has them.

    step: of a first pass, which has the last two known tokens of each draft's sequence; None: one row follows the
    last pass. layout: every sequence has the blocks of the longest that it can be.
    """
    counts, last = (rows.lengths, rows.fed) if step is None else (step.counts, step.last)
    _advance[(len(layout.seq_len),)](
        rows.numbers, len(rows.lengths), counts, last, rows.lengths, rows.fed, rows.positions,
        layout.page_indptr, layout.page_indices, layout.seq_len, layout.last_page_len, layout.positions,
        layout.slots, FIRST=step is not None, BLOCK_SIZE=block_size, num_warps=1,
    )  # fmt: skip
