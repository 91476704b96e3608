"""The layout of a step as index arrays, in the form that paged attention kernels read.

Turns block tables into lists of pages and slots, and fills the arrays of padding rows and sequences. Works on the
CPU, in one buffer, so that one transfer takes all arrays to a device. Knows neither the device nor the library
that reads them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.kernels.interface.shapes import RowLayout

NO_SLOT = -1  # the slot of a row that stores nothing
PADDING_BLOCK = 0  # the block that padding sequences read; any block would do, since their results are ignored
_ALIGNMENT = 4  # numbers: each array begins at a multiple of 16 bytes, like a separate allocation


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSizes:
    """Capacity of the index arrays. pages: of all sequences together."""

    rows: int
    sequences: int
    pages: int

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the arrays in int32, in the order of `packed`."""
        indptr = self.sequences + 1
        return (indptr, indptr, self.sequences, self.sequences, 2 * self.rows, 2 * self.rows, self.pages)

    @property
    def numbers(self) -> int:
        """Length of `packed`, in int32."""
        return sum(map(_aligned, self.lengths))


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLayout:
    """Index arrays of one step, int32 unless stated otherwise, all views of `packed`.

    query_indptr: [S + 1]; sequence s owns rows query_indptr[s] : query_indptr[s + 1].
    page_indptr: [S + 1]; its pages are page_indices[page_indptr[s] : page_indptr[s + 1]], in order of position.
    page_indices: [pages of all sequences]; block numbers. Last in `packed`, so that a transfer can leave out the
        unused ones.
    last_page_len: [S]; positions in each sequence's last page, 1 … block_size.
    seq_len: [S]; (pages - 1) * block_size + last_page_len.
    positions: [R] int64; each row's position in its sequence.
    slots: [R] int64; where each row is stored: block * block_size + offset, or NO_SLOT.

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
        """For a layout without padding: whether every sequence has exactly one row."""
        return len(self.positions) == len(self.seq_len)

    @property
    def sizes(self) -> LayoutSizes:
        return LayoutSizes(rows=len(self.positions), sequences=len(self.seq_len), pages=len(self.page_indices))

    def within(self, packed: Tensor) -> "PagedLayout":
        """The same arrays as views of a copy of `packed`, on any device."""
        return layout_within(packed, self.sizes)


def paged_layout(layout: RowLayout, block_size: int, allocate: Callable[[int], Tensor]) -> PagedLayout:
    """The index arrays of a step, without padding. allocate: makes `packed`, this many int32 on the CPU."""
    sizes = LayoutSizes(
        rows=len(layout.positions), sequences=len(layout.seq_len), pages=_num_pages(layout, block_size)
    )
    found = layout_within(allocate(sizes.numbers), sizes)
    LayoutWriter(found, block_size, one_row_each=False).fill(layout)
    return found


class LayoutWriter:
    """Writes the layouts of successive steps into the same arrays, which may be longer than a step needs.

    target: on the CPU. Padding rows have position 0 and NO_SLOT; padding sequences have one position, in
    PADDING_BLOCK, and no row; with one_row_each they have one row. rows_each: they have as many rows and
    positions, at most block_size; None: as above.
    """

    def __init__(
        self, target: PagedLayout, block_size: int, *, one_row_each: bool, rows_each: int | None = None
    ) -> None:
        self._block_size = block_size
        self._padding_rows = rows_each or int(one_row_each)
        assert self._padding_rows <= block_size, f"{rows_each} rows of padding do not fit into a block"
        self._sizes = target.sizes
        self._query_indptr, self._page_indptr = target.query_indptr.numpy(), target.page_indptr.numpy()
        self._pages, self._last_page_len = target.page_indices.numpy(), target.last_page_len.numpy()
        self._seq_len = target.seq_len.numpy()
        self._positions, self._slots = target.positions.numpy(), target.slots.numpy()
        self._steps = np.arange(1, self._sizes.sequences + 1, dtype=np.int32)
        self._num_before_pages = self._sizes.numbers - _aligned(self._sizes.pages)

    def fill(self, layout: RowLayout) -> int:
        """Write a layout. Returns how many of the first numbers of `packed` are read: all but the unused pages."""
        starts, lengths, table = layout.query_start.numpy(), layout.seq_len.numpy(), layout.block_table.numpy()
        positions = layout.positions.numpy()
        num_rows, count, sizes = len(positions), len(lengths), self._sizes
        missing = sizes.sequences - count
        assert num_rows <= sizes.rows, f"{num_rows} rows do not fit into {sizes.rows}"
        assert missing >= 0, f"{count} sequences do not fit into {sizes.sequences}"
        blocks, offsets = np.divmod(lengths - 1, self._block_size)  # of each sequence's last position
        _check(lengths, blocks, table.shape[1])
        num_pages, ends = blocks + 1, self._page_indptr[1 : count + 1]
        np.add.accumulate(num_pages, out=ends)
        used = int(ends[-1]) if count else 0
        assert used + missing <= sizes.pages, (
            f"{used} blocks and {missing} for padding; there is room for {sizes.pages}"
        )
        self._page_indptr[0] = 0
        self._query_indptr[: count + 1] = starts
        self._seq_len[:count] = lengths
        np.add(offsets, 1, out=self._last_page_len[:count])
        self._positions[:num_rows], self._positions[num_rows:] = positions, 0
        pages = self._pages[:used]
        _fill_pages(pages, table, num_pages, self._page_indptr[:count])
        self._slots[num_rows:] = NO_SLOT
        if num_rows == count:
            self._fill_slots(pages[ends - 1], offsets)
        else:
            owners = np.arange(count).repeat(starts[1:] - starts[:-1])
            blocks, offsets = np.divmod(positions, self._block_size)
            self._fill_slots(table[owners, blocks], offsets)
        if missing:
            self._pad(num_rows, count, used)
        return self._num_before_pages + used + missing

    def _fill_slots(self, blocks: NDArray[np.int32], offsets: NDArray[np.int32]) -> None:
        """Slots of rows in these blocks, at these offsets."""
        slots = self._slots[: len(blocks)]
        np.multiply(blocks, self._block_size, out=slots, dtype=np.int64)
        slots += offsets

    def _pad(self, num_rows: int, count: int, used: int) -> None:
        """Fill the arrays of the padding sequences."""
        missing = self._sizes.sequences - count
        steps = self._steps[:missing]
        self._query_indptr[count + 1 :] = num_rows + steps * self._padding_rows
        self._page_indptr[count + 1 :] = used + steps
        self._pages[used : used + missing] = PADDING_BLOCK
        self._seq_len[count:] = self._last_page_len[count:] = max(self._padding_rows, 1)


def _fill_pages(
    pages: NDArray[np.int32],
    table: NDArray[np.int32],
    num_pages: NDArray[np.int32],
    begins: NDArray[np.int32],
) -> None:
    """Concatenate the blocks of the sequences. No mask of the table: one long sequence makes the table wide."""
    firsts = np.arange(len(begins)) * table.shape[1]  # index of each sequence's first entry in the flattened table
    places = np.arange(len(pages))
    places += (firsts - begins).repeat(num_pages)
    table.reshape(-1).take(places, out=pages, mode="clip")  # another mode would copy


def _check(lengths: NDArray[np.int32], blocks: NDArray[np.int32], width: int) -> None:
    """blocks: index of each sequence's last block, below 0 for a sequence without positions."""
    if len(blocks):
        assert np.minimum.reduce(blocks) >= 0, f"a sequence of {lengths.min()} positions has no row"
        most = np.maximum.reduce(blocks) + 1
        assert most <= width, f"{most} blocks are read of {width}"


def _num_pages(layout: RowLayout, block_size: int) -> int:
    """Pages of all sequences."""
    return int(((layout.seq_len.numpy() + (block_size - 1)) // block_size).sum())


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
