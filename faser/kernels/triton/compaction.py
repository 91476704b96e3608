"""Rows that stay: from how many first rows of each sequence stay to the rows themselves, close together.

For early pruning, which lets rows leave in the middle of a forward (engine/spec/pruning.py):

    first_row      |  0   1   2  |  3  |  4   5   6  |  end 7
    num_staying    |      2      |  1  |      1      |
    staying        |  0   1   3   4   -   -   -            - is NO_ROW, up to the number of rows there were
    next_first_row |  0       2     3     4                where they now begin

Nothing here waits for the device, and grids depend on how many rows there may be, not on how many stay. Knows
nothing of why rows leave.
"""

import torch
import triton.language as tl
from torch import Tensor

from faser.kernels.triton.tensors import expect, expect_lines, jit, next_power_of_2

NO_ROW = -1

_BLOCK = 1024
_NO_ROW = tl.constexpr(NO_ROW)


@jit
def _list_staying(
    first_row, num_staying, staying, next_first_row, num_sequences, num_rows,
    SEQUENCES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program per sequence; the last one, of none, marks the places that stay free."""
    s = tl.program_id(0)
    each = tl.arange(0, SEQUENCES)
    before = tl.sum(tl.load(num_staying + each, mask=each < tl.minimum(s, num_sequences), other=0))
    tl.store(next_first_row + s, before)
    i = tl.arange(0, ROWS)
    if s < num_sequences:
        tl.store(staying + before + i, tl.load(first_row + s) + i, mask=i < tl.load(num_staying + s))
    else:
        tl.store(staying + before + i, tl.full((ROWS,), _NO_ROW, tl.int32), mask=before + i < num_rows)


@jit
def _gather(values, stride, staying, out, out_stride, width, BLOCK: tl.constexpr):
    place = tl.program_id(0)
    row = tl.load(staying + place)
    if row >= 0:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < width
        found = tl.load(values + row.to(tl.int64) * stride + columns, mask=inside)
        tl.store(out + place.to(tl.int64) * out_stride + columns, found, mask=inside)


def list_staying(first_row: Tensor, num_staying: Tensor, staying: Tensor, next_first_row: Tensor) -> None:
    """staying: [R] int32, the rows that stay, NO_ROW behind them. next_first_row: [S + 1] int32.

    first_row: [S + 1] int32, R at the end. num_staying: [S] int32, of each sequence, at most what it has. The last
    two are on the device and trusted. Raises EngineError for tensors that do not fit.
    """
    num_sequences, num_rows = len(num_staying), len(staying)
    expect("num_staying", num_staying, (num_sequences,), torch.int32, like=first_row)
    expect("first_row", first_row, (num_sequences + 1,), torch.int32, like=first_row)
    expect("staying", staying, (num_rows,), torch.int32, like=first_row)
    expect("next_first_row", next_first_row, (num_sequences + 1,), torch.int32, like=first_row)
    _list_staying[(num_sequences + 1,)](
        first_row, num_staying, staying, next_first_row, num_sequences, num_rows,
        SEQUENCES=next_power_of_2(max(num_sequences, 1)), ROWS=next_power_of_2(max(num_rows, 1)),
    )  # fmt: skip


def gather_rows(values: Tensor, staying: Tensor, out: Tensor) -> Tensor:
    """out[i] = values[staying[i]]; where that is NO_ROW, out[i] stays as it is. Not in place.

    values: [R, H], out: [N, H] of the same type, rows in line. staying: [N] int32. Raises EngineError.
    """
    width = values.shape[1]
    expect_lines("values", values, (len(values), width), values.dtype, like=values)
    expect("staying", staying, (len(staying),), torch.int32, like=values)
    expect_lines("out", out, (len(staying), width), values.dtype, like=values)
    if len(staying) and width:
        grid = (len(staying), -(-width // _BLOCK))
        _gather[grid](values, values.stride(0), staying, out, out.stride(0), width, BLOCK=_BLOCK)
    return out
