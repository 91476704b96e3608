"""Draft tokens: predictions of what another model draws with the same number, and their margins.

The contract is SamplingKernels.nearest. The probabilities of a row fill [0, 1] in the order of token ids. The
prediction is the token with most of the window around the number; with a window of 0 it is the token at the
number.

    probability |  0  |   1   | 2 |       3        |  4  |
    number                             |
    window                |------------|------------|            3 has most of it

Each chunk finds its best token, then each row the best of its chunks. Ends of the window are float64, rounded as
engine/execution/sampling/kernels.py does it, one operation after the other.
"""

import struct

import triton.language as tl
from torch import Tensor

from faser.errors import EngineError
from faser.kernels.cuda.triton.common import EXACT, jit
from faser.kernels.cuda.triton.sampling.draws import drawn
from faser.kernels.cuda.triton.sampling.fixed_point import kept_probs
from faser.kernels.cuda.triton.sampling.noise import row_number
from faser.kernels.cuda.triton.sampling.workspace import SamplingInputs, SamplingWorkspace

SMALLEST_WINDOW = 2.0**-20  # a narrower one might be empty once its ends are rounded


@jit
def _margin_of(token_id, best_id, best_margin, row, logits, stride, largest, warmth):
    """float32, a token's scaled logit minus the largest other: below 0 unless it is the most likely token."""
    behind = tl.load(logits + row.to(tl.int64) * stride + token_id) - tl.load(largest + row)
    return tl.div_rn(tl.where(token_id == best_id, best_margin, behind), warmth)


@jit
def _chunk_draft(
    logits, stride, width, largest, best, temperature, log_min_p, chunk_weight, edge_key, edge_id, chunk_prob,
    source, positions, window_bits, chunk_inside, chunk_first,
    GIVEN: tl.constexpr, NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """chunk_first: the first token of a chunk with most of the window. chunk_inside: how much, 0 without any."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    if (tl.load(best + row) >= 0) & (tl.load(temperature + row) > 0):
        chunks = tl.arange(0, SPAN)
        sums = tl.load(chunk_prob + row * NUM_CHUNKS + chunks, mask=chunks < NUM_CHUNKS, other=0)
        total = tl.sum(sums).to(tl.float64)
        centre = row_number(source, positions, row, GIVEN) * total
        reach = window_bits.to(tl.float64, bitcast=True) * total
        low, high = centre - reach, centre + reach
        before = tl.sum(tl.where(chunks < chunk, sums, 0))
        behind = tl.sum(tl.where(chunks <= chunk, sums, 0))
        place = row * NUM_CHUNKS + chunk
        if (before.to(tl.float64) < high) & (behind.to(tl.float64) > low):
            columns = chunk * BLOCK + tl.arange(0, BLOCK)
            fixed_probs = kept_probs(
                row, columns, logits, stride, width, largest, temperature, log_min_p, chunk_weight, edge_key,
                edge_id, NUM_CHUNKS, SPAN,
            )  # fmt: skip
            ends = before + tl.cumsum(fixed_probs, 0)
            starts = (ends - fixed_probs).to(tl.float64)
            ends = ends.to(tl.float64)
            inside = tl.where(ends < high, ends, high) - tl.where(starts > low, starts, low)
            most = tl.max(inside)
            tl.store(chunk_inside + place, most)
            tl.store(chunk_first + place, tl.min(tl.where(inside == most, columns, width)).to(tl.int64))
        else:
            tl.store(chunk_inside + place, before.to(tl.float64) * 0.0)


@jit
def _row_draft(
    logits, stride, width, largest, best, best_margin, temperature, chunk_inside, chunk_first, chosen, margins,
    NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    best_id, margin, warmth = tl.load(best + row), tl.load(best_margin + row), tl.load(temperature + row)
    token_id = best_id
    if (best_id >= 0) & (warmth > 0):
        chunk = tl.arange(0, SPAN)
        there = chunk < NUM_CHUNKS
        inside = tl.load(chunk_inside + row * NUM_CHUNKS + chunk, mask=there, other=-1.0)
        columns = tl.load(chunk_first + row * NUM_CHUNKS + chunk, mask=there, other=0)
        token_id = tl.min(tl.where(inside == tl.max(inside), columns, width))
        margin = _margin_of(token_id, best_id, margin, row, logits, stride, largest, warmth)
    tl.store(chosen + row, token_id)
    tl.store(margins + row, margin)


@jit
def _drawn_draft(
    logits, stride, width, largest, best, temperature, log_min_p, chunk_weight, edge_key, edge_id, chunk_prob,
    source, positions, best_margin, chosen, margins,
    GIVEN: tl.constexpr, NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    best_id, margin, warmth = tl.load(best + row), tl.load(best_margin + row), tl.load(temperature + row)
    token_id = best_id
    if (best_id >= 0) & (warmth > 0):
        token_id = drawn(
            row, logits, stride, width, largest, temperature, log_min_p, chunk_weight, edge_key, edge_id,
            chunk_prob, source, positions, GIVEN, NUM_CHUNKS, SPAN, BLOCK,
        )  # fmt: skip
        margin = _margin_of(token_id, best_id, margin, row, logits, stride, largest, warmth)
    tl.store(chosen + row, token_id)
    tl.store(margins + row, margin)


def expect_window(window: float) -> None:
    """Raises EngineError."""
    if window != 0 and not SMALLEST_WINDOW <= window <= 1:
        raise EngineError(f"window is {window}; it must be 0, or from {SMALLEST_WINDOW} to 1")


def draft_nearest(
    shaped: SamplingInputs, space: SamplingWorkspace, window: float, chosen: Tensor, margins: Tensor
) -> None:
    """Fill chosen [R] int64 and margins [R] float32; with `best` and its margin without a temperature or a token.

    window: from SMALLEST_WINDOW to 1. space: best, margin, largest, chunk_weight, the edges and chunk_prob of
    these rows. Two launches.
    """
    if not shaped.num_rows:
        return
    _chunk_draft[(shaped.num_rows, space.num_chunks)](
        *space.prob_arguments(shaped), space.chunk_prob, *shaped.noise, _bits(window), space.chunk_inside,
        space.chunk_first, GIVEN=shaped.has_uniforms, **space.sizes, **EXACT,
    )  # fmt: skip
    _row_draft[(shaped.num_rows,)](
        shaped.logits, shaped.stride, shaped.width, space.largest, space.best, space.margin,
        shaped.rows.temperature, space.chunk_inside, space.chunk_first, chosen, margins,
        NUM_CHUNKS=space.num_chunks, SPAN=space.span, **EXACT,
    )  # fmt: skip


def draft_drawn(shaped: SamplingInputs, space: SamplingWorkspace, chosen: Tensor, margins: Tensor) -> None:
    """As draft_nearest with a window of 0: what draw_tokens takes. One launch."""
    if shaped.num_rows:
        _drawn_draft[(shaped.num_rows,)](
            *space.prob_arguments(shaped), space.chunk_prob, *shaped.noise, space.margin, chosen, margins,
            GIVEN=shaped.has_uniforms, **space.sizes, **EXACT,
        )  # fmt: skip


def _bits(window: float) -> int:
    """Of a float64, above 2**32 for every window: Triton would round a float argument to float32."""
    (bits,) = struct.unpack("<q", struct.pack("<d", window))
    return int(bits)
