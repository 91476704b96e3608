"""Edits of logits before a token is sampled: bias, penalties, masks, in place.

The same bits as engine/execution/sampling/logits_processors/torch_kernels.py. Entries are ragged; the i-th row
that has any owns those from row_start[i] to row_start[i + 1]:

    rows         |   0   |     3     |  4  |    rows without entries are left as they are
    entries      |  0  1 |  2  3  4  |  5  |

One launch for each edit, whatever the number of rows. Temperature and min_p need no pass of their own: the kernels
that sample apply them as they read.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from faser.errors import EngineError
from faser.kernels.cuda.triton.common import EXACT, expect, expect_lines, jit, jit_for_any
from faser.kernels.cuda.triton.sampling.fixed_point import NOTHING

_BLOCK = 256
_COLUMNS = 1024  # of a program that looks for each of them among the allowed tokens
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEntries:
    """N entries in M rows of logits [R, V], each at most once.

    rows: [M] int64, distinct. row_start: [M + 1] int64, N at the end. token_ids: [N] int64. max_entries: at
    least the number of entries of any row.
    """

    rows: Tensor
    row_start: Tensor
    token_ids: Tensor
    max_entries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPenalties:
    """output_counts: [N], how often the row has generated the entry's token. The rest: [M]. All float64."""

    output_counts: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


@jit
def _entry(i, rows, row_start, stride, token_ids, logits, BLOCK: tl.constexpr):
    """Entries of the i-th row for this program, their addresses in the logits, and which of them exist."""
    at = tl.load(row_start + i) + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < tl.load(row_start + i + 1)
    return at, logits + tl.load(rows + i) * stride + tl.load(token_ids + at, mask=there, other=0), there


@jit
def _add_bias(logits, stride, rows, row_start, token_ids, bias, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    at, place, there = _entry(i, rows, row_start, stride, token_ids, logits, BLOCK)
    added = tl.load(bias + at, mask=there, other=0.0).to(tl.float32)
    tl.store(place, tl.load(place, mask=there, other=0.0) + added, mask=there)


@jit
def _penalise(
    logits, stride, rows, row_start, token_ids, output_counts, repetition, frequency, presence, BLOCK: tl.constexpr
):
    i = tl.program_id(0)
    at, place, there = _entry(i, rows, row_start, stride, token_ids, logits, BLOCK)
    counts = tl.load(output_counts + at, mask=there, other=0.0)
    factor = tl.load(repetition + i)
    value = tl.load(place, mask=there, other=0.0).to(tl.float64)
    value = tl.where(value > 0, value / factor, value * factor)
    value = value - tl.load(frequency + i) * counts
    value = value - tl.load(presence + i) * (counts > 0).to(tl.float64)
    value = tl.where(value > _LARGEST, _LARGEST, value)
    value = tl.where(value < -_LARGEST, -_LARGEST, value)
    tl.store(place, value.to(tl.float32), mask=there)


@jit
def _forbid(logits, stride, rows, row_start, token_ids, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    _, place, there = _entry(i, rows, row_start, stride, token_ids, logits, BLOCK)
    tl.store(place, tl.full((BLOCK,), NOTHING, tl.float32), mask=there)


@jit_for_any("num_halvings")
def _allow_only(logits, stride, width, rows, row_start, token_ids, num_halvings, BLOCK: tl.constexpr):
    """Each column is searched for among the row's entries, by bisection."""
    i = tl.program_id(0)
    end = tl.load(row_start + i + 1)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros((BLOCK,), tl.int64) + tl.load(row_start + i)
    high = tl.zeros((BLOCK,), tl.int64) + end
    for _ in range(num_halvings):
        middle = (low + high) // 2
        is_open = low < high
        is_below = is_open & (tl.load(token_ids + middle, mask=is_open, other=0) < columns)
        low = tl.where(is_below, middle + 1, low)
        high = tl.where(is_open & (is_below == 0), middle, high)
    found = tl.load(token_ids + low, mask=low < end, other=-1) == columns
    place = logits + tl.load(rows + i) * stride + columns
    tl.store(place, tl.full((BLOCK,), NOTHING, tl.float32), mask=(columns < width) & (found == 0))


@jit
def _mask(logits, stride, width, rows, words, words_stride, BLOCK: tl.constexpr):
    """Each column reads its bit."""
    i = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    word = tl.load(words + i * words_stride + columns // 64, mask=inside, other=0)
    is_forbidden = ((word >> (columns % 64).to(tl.int64)) & 1) == 0
    place = logits + tl.load(rows + i) * stride + columns
    tl.store(place, tl.full((BLOCK,), NOTHING, tl.float32), mask=inside & is_forbidden)


def add_bias(logits: Tensor, at: RowEntries, bias: Tensor) -> None:
    """Add bias [N] float64, rounded to float32, to the entries of logits [R, V] float32. Raises EngineError."""
    grid = _checked(logits, at)
    expect("bias", bias, (len(at.token_ids),), torch.float64, like=logits)
    if grid:
        _add_bias[grid](logits, logits.stride(0), at.rows, at.row_start, at.token_ids, bias, BLOCK=_BLOCK)


def penalise(logits: Tensor, at: RowEntries, penalties: RowPenalties) -> None:
    """Make tokens that occurred less likely; see penalise in torch_kernels.py. Raises EngineError.

    The entries: every token of the row's prompt and output. Arithmetic in float64; results are
    clamped to the range of float32.
    """
    grid = _checked(logits, at)
    expect("output_counts", penalties.output_counts, (len(at.token_ids),), torch.float64, like=logits)
    strengths = (penalties.repetition, penalties.frequency, penalties.presence)
    for name, each in zip(("repetition", "frequency", "presence"), strengths, strict=True):
        expect(name, each, (len(at.rows),), torch.float64, like=logits)
    if grid:
        where = (logits, logits.stride(0), at.rows, at.row_start, at.token_ids)
        _penalise[grid](*where, penalties.output_counts, *strengths, BLOCK=_BLOCK, **EXACT)


def allow_only(logits: Tensor, at: RowEntries) -> None:
    """Forbid every token of the rows that has no entry. Entries ascend within a row. Raises EngineError."""
    _checked(logits, at)
    if len(at.rows):
        grid = (len(at.rows), -(-logits.shape[1] // _COLUMNS))
        where = (logits, logits.stride(0), logits.shape[1], at.rows, at.row_start, at.token_ids)
        _allow_only[grid](*where, at.max_entries.bit_length(), BLOCK=_COLUMNS)


def forbid(logits: Tensor, at: RowEntries) -> None:
    """Give the entries a probability of exactly 0. Raises EngineError."""
    if grid := _checked(logits, at):
        _forbid[grid](logits, logits.stride(0), at.rows, at.row_start, at.token_ids, BLOCK=_BLOCK)


def mask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Forbid every token of the rows whose bit is 0; see MaskEdit. Raises EngineError."""
    expect_lines("logits", logits, tuple(logits.shape), torch.float32, like=logits)
    expect("rows", rows, (len(rows),), torch.int64, like=logits)
    expect("words", words, (len(rows), words.shape[1]), torch.int64, like=logits)
    if words.shape[1] * 64 < logits.shape[1]:
        raise EngineError(f"a mask has {words.shape[1] * 64} bits; a row has {logits.shape[1]} logits")
    if len(rows):
        grid = (len(rows), -(-logits.shape[1] // _COLUMNS))
        where = (logits, logits.stride(0), logits.shape[1], rows)
        _mask[grid](*where, words, words.stride(0), BLOCK=_COLUMNS)


def _checked(logits: Tensor, at: RowEntries) -> tuple[int, int] | None:
    """The grid over entries; None where there are none."""
    expect_lines("logits", logits, tuple(logits.shape), torch.float32, like=logits)
    expect("rows", at.rows, (len(at.rows),), torch.int64, like=logits)
    expect("row_start", at.row_start, (len(at.rows) + 1,), torch.int64, like=logits)
    expect("token_ids", at.token_ids, (len(at.token_ids),), torch.int64, like=logits)
    if at.max_entries < 0 or at.max_entries > logits.shape[1]:
        raise EngineError(f"max_entries is {at.max_entries}; a row has from 0 to {logits.shape[1]}")
    if not len(at.rows) or not at.max_entries:
        return None
    return len(at.rows), -(-at.max_entries // _BLOCK)
