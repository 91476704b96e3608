"""Rows and blocks as index arrays: the layout of a step the way paged attention kernels read it.

Owns the arithmetic from block tables to lists of pages. Knows neither a device nor the library that reads the
arrays: everything here is on the CPU, in one buffer, so that one transfer takes all of it to wherever it is read.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.kernels.backend import RowLayout

_ALIGNMENT = 4  # numbers; arrays begin at multiples of 16 bytes, as arrays of their own would


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLayout:
    """Index arrays of one step, int32, all views of `packed`.

    query_indptr: [S + 1]; sequence s owns rows query_indptr[s] : query_indptr[s + 1].
    page_indptr: [S + 1]; its pages are page_indices[page_indptr[s] : page_indptr[s + 1]], in order of position.
    page_indices: [pages of all sequences]; numbers of blocks.
    last_page_len: [S]; positions in each sequence's last page, 1 … block_size.
    seq_len: [S]; (pages - 1) * block_size + last_page_len.
    sequences, positions: [R]; each row's sequence, 0 … S - 1, and its position there.

        block_size 4, seq_len 6    page_indices | 7 . . . | 2 . |    last_page_len 2
        positions                                 0 1 2 3   4 5
    """

    packed: Tensor
    query_indptr: Tensor
    page_indptr: Tensor
    page_indices: Tensor
    last_page_len: Tensor
    seq_len: Tensor
    sequences: Tensor
    positions: Tensor

    @property
    def one_row_each(self) -> bool:
        """Every sequence has exactly one row: plain decoding."""
        return len(self.positions) == len(self.seq_len)

    def within(self, packed: Tensor) -> "PagedLayout":
        """The same arrays as views of a copy of `packed`, on any device."""
        assert packed.shape == self.packed.shape, (packed.shape, self.packed.shape)
        arrays = (
            self.query_indptr,
            self.page_indptr,
            self.page_indices,
            self.last_page_len,
            self.seq_len,
            self.sequences,
            self.positions,
        )
        return _views(packed, [len(each) for each in arrays])


def paged_layout(layout: RowLayout, block_size: int, allocate: Callable[[int], Tensor]) -> PagedLayout:
    """Lay a step out in pages.

    allocate: gives that many int32 on the CPU, for `packed`.
    """
    seq_len: NDArray[np.int32] = layout.seq_len.numpy()
    starts, table = layout.query_start.numpy(), layout.block_table.numpy()
    num_pages = -(-seq_len // np.int32(block_size))
    assert seq_len.min() >= 1, f"a sequence of {seq_len.min()} positions has no row"
    assert num_pages.max() <= table.shape[1], f"{num_pages.max()} blocks are read of {table.shape[1]}"
    num_rows = len(layout.positions)
    lengths = [len(starts), len(starts), int(num_pages.sum()), len(seq_len), len(seq_len), num_rows, num_rows]
    found = _views(allocate(sum(map(_aligned, lengths))), lengths)
    found.query_indptr.numpy()[:] = starts
    page_indptr = found.page_indptr.numpy()
    page_indptr[0] = 0
    np.cumsum(num_pages, out=page_indptr[1:])
    found.page_indices.numpy()[:] = table[np.arange(table.shape[1]) < num_pages[:, None]]
    found.last_page_len.numpy()[:] = seq_len - (num_pages - 1) * block_size
    found.seq_len.numpy()[:] = seq_len
    found.sequences.numpy()[:] = np.repeat(np.arange(len(seq_len), dtype=np.int32), np.diff(starts))
    found.positions.numpy()[:] = layout.positions.numpy()
    return found


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _views(packed: Tensor, lengths: list[int]) -> PagedLayout:
    assert packed.dtype is torch.int32, packed.dtype
    arrays = []
    start = 0
    for length in lengths:
        arrays.append(packed[start : start + length])
        start += _aligned(length)
    assert start == len(packed), (start, len(packed))
    query_indptr, page_indptr, page_indices, last_page_len, seq_len, sequences, positions = arrays
    return PagedLayout(
        packed=packed,
        query_indptr=query_indptr,
        page_indptr=page_indptr,
        page_indices=page_indices,
        last_page_len=last_page_len,
        seq_len=seq_len,
        sequences=sequences,
        positions=positions,
    )
