"""What is done to logits before a token is chosen: bias, penalties, forbidden tokens; in this order, in place.

The same bits as engine/processors.py. Entries are ragged: row r has those from row_start[r] to row_start[r + 1].

    row          |   0    | 1 |      2      |    a row without entries is left as it is
    entries      |  0  1  |   |  2   3   4  |

Temperature and min_p need no pass of their own: the kernels that choose apply them as they read.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from faser.errors import EngineError
from faser.kernels.triton.masses import NOTHING
from faser.kernels.triton.tensors import EXACT, expect, expect_lines, jit

_BLOCK = 256
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEntries:
    """N places in logits [R, V], each at most once.

    row_start: [R + 1] int32, N at the end. token_ids: [N] int64. max_entries: at least those of the longest row.
    """

    row_start: Tensor
    token_ids: Tensor
    max_entries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPenalties:
    """output_counts: [N] float64, how often the row has generated the entry's token. The rest: [R] float64."""

    output_counts: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


@jit
def _entry(row_start, row, BLOCK: tl.constexpr):
    """Entries of a row that this program has, and which of these there are."""
    at = tl.load(row_start + row) + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return at, at < tl.load(row_start + row + 1)


@jit
def _add_bias(logits, stride, row_start, token_ids, bias, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at, there = _entry(row_start, row, BLOCK)
    place = logits + row.to(tl.int64) * stride + tl.load(token_ids + at, mask=there, other=0)
    value = tl.load(place, mask=there, other=0.0) + tl.load(bias + at, mask=there, other=0.0)
    tl.store(place, value, mask=there)


@jit
def _penalise(
    logits, stride, row_start, token_ids, output_counts, repetition, frequency, presence, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    at, there = _entry(row_start, row, BLOCK)
    place = logits + row.to(tl.int64) * stride + tl.load(token_ids + at, mask=there, other=0)
    counts = tl.load(output_counts + at, mask=there, other=0.0)
    factor = tl.load(repetition + row)
    value = tl.load(place, mask=there, other=0.0).to(tl.float64)
    value = tl.where(value > 0, value / factor, value * factor)
    value = value - tl.load(frequency + row) * counts
    value = value - tl.load(presence + row) * (counts > 0).to(tl.float64)
    value = tl.where(value > _LARGEST, _LARGEST, value)
    value = tl.where(value < -_LARGEST, -_LARGEST, value)
    tl.store(place, value.to(tl.float32), mask=there)


@jit
def _forbid(logits, stride, row_start, token_ids, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at, there = _entry(row_start, row, BLOCK)
    place = logits + row.to(tl.int64) * stride + tl.load(token_ids + at, mask=there, other=0)
    tl.store(place, tl.full((BLOCK,), NOTHING, tl.float32), mask=there)


def add_bias(logits: Tensor, at: RowEntries, bias: Tensor) -> None:
    """Add bias [N] float32 to the entries of logits [R, V] float32. Raises EngineError."""
    grid = _checked(logits, at)
    expect("bias", bias, (len(at.token_ids),), torch.float32, like=logits)
    if grid:
        _add_bias[grid](logits, logits.stride(0), at.row_start, at.token_ids, bias, BLOCK=_BLOCK)


def penalise(logits: Tensor, at: RowEntries, penalties: RowPenalties) -> None:
    """Make tokens that occurred less likely; the rule is processors.penalise. Raises EngineError.

    The entries: every token of the row's prompt and output. Arithmetic in float64; what leaves the range of
    float32 stays at its end.
    """
    grid = _checked(logits, at)
    expect("output_counts", penalties.output_counts, (len(at.token_ids),), torch.float64, like=logits)
    strengths = (penalties.repetition, penalties.frequency, penalties.presence)
    for name, each in zip(("repetition", "frequency", "presence"), strengths, strict=True):
        expect(name, each, (len(logits),), torch.float64, like=logits)
    if grid:
        where = (logits, logits.stride(0), at.row_start, at.token_ids)
        _penalise[grid](*where, penalties.output_counts, *strengths, BLOCK=_BLOCK, **EXACT)


def forbid(logits: Tensor, at: RowEntries) -> None:
    """Give the entries a probability of exactly 0. Raises EngineError."""
    if grid := _checked(logits, at):
        _forbid[grid](logits, logits.stride(0), at.row_start, at.token_ids, BLOCK=_BLOCK)


def _checked(logits: Tensor, at: RowEntries) -> tuple[int, int] | None:
    """The grid; None where there is nothing to do."""
    expect_lines("logits", logits, tuple(logits.shape), torch.float32, like=logits)
    expect("row_start", at.row_start, (len(logits) + 1,), torch.int32, like=logits)
    expect("token_ids", at.token_ids, (len(at.token_ids),), torch.int64, like=logits)
    if at.max_entries < 0 or at.max_entries > logits.shape[1]:
        raise EngineError(f"max_entries is {at.max_entries}; a row has from 0 to {logits.shape[1]}")
    if not len(logits) or not at.max_entries:
        return None
    return len(logits), -(-at.max_entries // _BLOCK)
