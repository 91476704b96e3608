"""Rows and blocks as index arrays: the layout of a step the way paged attention kernels read it.

Owns the arithmetic from block tables to lists of pages and slots, and what stands for rows and sequences that are
not there. Knows neither a device nor the library that reads the arrays: everything here is on the CPU, in one
buffer, so that one transfer takes all of it to wherever it is read.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.kernels.backend import RowLayout

NO_SLOT = -1  # where a row stores nothing
PADDING_BLOCK = 0  # read by sequences that are not there: any block will do, nobody looks at what they yield
_ALIGNMENT = 4  # numbers; arrays begin at multiples of 16 bytes, as arrays of their own would


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSizes:
    """Room that index arrays have. pages: of all sequences together."""

    rows: int
    sequences: int
    pages: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the arrays, in the order of `packed`, in int32."""
        indptr = self.sequences + 1
        return (indptr, indptr, self.sequences, self.sequences, 2 * self.rows, 2 * self.rows, self.pages)

    @property
    def numbers(self) -> int:
        """How many int32 hold all arrays."""
        return sum(map(_aligned, self.lengths))


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLayout:
    """Index arrays of one step, int32 unless something else is said, all views of `packed`.

    query_indptr: [S + 1]; sequence s owns rows query_indptr[s] : query_indptr[s + 1].
    page_indptr: [S + 1]; its pages are page_indices[page_indptr[s] : page_indptr[s + 1]], in order of position.
    page_indices: [pages of all sequences]; numbers of blocks. Last in `packed`, so that pages which are not used
        need not be sent.
    last_page_len: [S]; positions in each sequence's last page, 1 … block_size.
    seq_len: [S]; (pages - 1) * block_size + last_page_len.
    positions: [R] int64; each row's position in its sequence.
    slots: [R] int64; where it is stored, block * block_size + offset, or NO_SLOT.

        block_size 4, seq_len 6    page_indices | 7 . . . | 2 . |    last_page_len 2
        positions                                 0 1 2 3   4 5
        slots                                    28 … 31    8 9
    """

    packed: Tensor
    query_indptr: Tensor
    page_indptr: Tensor
    page_indices: Tensor
    last_page_len: Tensor
    seq_len: Tensor
    positions: Tensor
    slots: Tensor

    @property
    def one_row_each(self) -> bool:
        """Of a layout without padding: every sequence has exactly one row, as in plain decoding."""
        return len(self.positions) == len(self.seq_len)

    @property
    def num_used(self) -> int:
        """How much of the beginning of `packed`, on the CPU, is read: all but pages of no sequence."""
        return len(self.packed) - _aligned(len(self.page_indices)) + int(self.page_indptr[-1])

    @property
    def sizes(self) -> LayoutSizes:
        return LayoutSizes(rows=len(self.positions), sequences=len(self.seq_len), pages=len(self.page_indices))

    def within(self, packed: Tensor) -> "PagedLayout":
        """The same arrays as views of a copy of `packed`, on any device."""
        return layout_within(packed, self.sizes)


def paged_layout(layout: RowLayout, block_size: int, allocate: Callable[[int], Tensor]) -> PagedLayout:
    """Lay a step out in pages, without padding.

    allocate: gives that many int32 on the CPU, for `packed`.
    """
    num_pages = _num_pages(layout, block_size)
    sizes = LayoutSizes(rows=len(layout.positions), sequences=len(num_pages), pages=int(num_pages.sum()))
    found = layout_within(allocate(sizes.numbers), sizes)
    fill(found, layout, block_size, one_row_each=False)
    return found


def fill(target: PagedLayout, layout: RowLayout, block_size: int, *, one_row_each: bool) -> None:
    """Lay a step out in pages, in arrays that may be longer than it needs.

    target: on the CPU. Rows behind the layout's have position 0 and NO_SLOT; sequences behind it have one
    position, in PADDING_BLOCK, and no row, or one where one_row_each.
    """
    sizes, num_pages = target.sizes, _num_pages(layout, block_size)
    num_rows, num_sequences = len(layout.positions), len(num_pages)
    missing, used = sizes.sequences - num_sequences, int(num_pages.sum())
    assert num_rows <= sizes.rows, f"{num_rows} rows do not fit into {sizes.rows}"
    assert missing >= 0, f"{num_sequences} sequences do not fit into {sizes.sequences}"
    assert used + missing <= sizes.pages, (
        f"{used} blocks and {missing} for padding; there is room for {sizes.pages}"
    )
    steps = np.arange(1, missing + 1, dtype=np.int32)
    query_indptr, page_indptr = target.query_indptr.numpy(), target.page_indptr.numpy()
    query_indptr[: num_sequences + 1] = layout.query_start.numpy()
    query_indptr[num_sequences + 1 :] = num_rows + steps if one_row_each else num_rows
    page_indptr[0] = 0
    np.cumsum(num_pages, out=page_indptr[1 : num_sequences + 1])
    page_indptr[num_sequences + 1 :] = used + steps
    pages = target.page_indices.numpy()
    _fill_pages(pages[:used], layout.block_table.numpy(), num_pages, page_indptr)
    pages[used : used + missing] = PADDING_BLOCK
    seq_len, last_page_len = target.seq_len.numpy(), target.last_page_len.numpy()
    seq_len[:num_sequences], seq_len[num_sequences:] = layout.seq_len.numpy(), 1
    last_page_len[:num_sequences] = seq_len[:num_sequences] - (num_pages - 1) * block_size
    last_page_len[num_sequences:] = 1
    _fill_rows(target, layout, block_size)


def _fill_pages(
    pages: NDArray[np.int32],
    table: NDArray[np.int32],
    num_pages: NDArray[np.int32],
    page_indptr: NDArray[np.int32],
) -> None:
    """Each sequence's blocks, one after the other. No mask of the table: a single long sequence makes it wide."""
    firsts = np.arange(len(num_pages)) * table.shape[1]  # in the table, all lines in one
    places = np.arange(len(pages)) + np.repeat(firsts - page_indptr[: len(num_pages)], num_pages)
    np.take(table.reshape(-1), places, out=pages, mode="clip")  # another mode would take a copy


def _fill_rows(target: PagedLayout, layout: RowLayout, block_size: int) -> None:
    starts, table = layout.query_start.numpy(), layout.block_table.numpy()
    positions, slots, num_rows = target.positions.numpy(), target.slots.numpy(), len(layout.positions)
    positions[:num_rows], positions[num_rows:] = layout.positions.numpy(), 0
    slots[num_rows:] = NO_SLOT
    owners = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    blocks, offsets = np.divmod(positions[:num_rows], block_size)
    slots[:num_rows] = table[owners, blocks]
    slots[:num_rows] *= block_size
    slots[:num_rows] += offsets


def _num_pages(layout: RowLayout, block_size: int) -> NDArray[np.int32]:
    """[S] pages of each sequence."""
    seq_len: NDArray[np.int32] = layout.seq_len.numpy()
    found: NDArray[np.int32] = -(-seq_len // np.int32(block_size))
    width, least = layout.block_table.shape[1], seq_len.min(initial=1)
    assert least >= 1, f"a sequence of {least} positions has no row"
    assert found.max(initial=0) <= width, f"{found.max()} blocks are read of {width}"
    return found


def layout_within(packed: Tensor, sizes: LayoutSizes) -> PagedLayout:
    """The arrays as views of a buffer, [sizes.numbers] int32, on any device."""
    assert packed.dtype is torch.int32, packed.dtype
    assert len(packed) == sizes.numbers, (len(packed), sizes)
    arrays = []
    start = 0
    for length in sizes.lengths:
        arrays.append(packed[start : start + length])
        start += _aligned(length)
    query_indptr, page_indptr, last_page_len, seq_len, positions, slots, page_indices = arrays
    return PagedLayout(
        packed=packed,
        query_indptr=query_indptr,
        page_indptr=page_indptr,
        page_indices=page_indices,
        last_page_len=last_page_len,
        seq_len=seq_len,
        positions=positions.view(torch.int64),
        slots=slots.view(torch.int64),
    )


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT
