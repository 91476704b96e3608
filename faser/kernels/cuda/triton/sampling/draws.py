"""A token of each row, by the race of kernels/interface/sampling.py: the first of the blocks, then of its columns.

block     |   0   |   1   |   2   | ... |     sums of the kept probabilities of 256 columns each, stored in parts
column            |-------|                   of the first block to arrive: each column's own probability
"""

import triton.language as tl
from torch import Tensor

from faser.kernels.cuda.triton.common import EXACT, jit
from faser.kernels.cuda.triton.sampling.fixed_point import kept_probs
from faser.kernels.cuda.triton.sampling.noise import arrivals, row_word
from faser.kernels.cuda.triton.sampling.workspace import SamplingInputs, SamplingWorkspace
from faser.kernels.interface.sampling import RACE_BLOCK

_BLOCK = tl.constexpr(RACE_BLOCK)


@jit
def _first(numbers, probs, indices, NONE: tl.constexpr):
    """The least index of those that arrive first; what has no probability never does. probs: int64."""
    times = numbers / tl.maximum(probs, 1).to(tl.float64)
    times = tl.where(probs > 0, times, float("inf"))
    return tl.min(tl.where(times == tl.min(times), indices, NONE))


@jit
def drawn(
    row, logits, stride, width, largest, temperature, log_min_p, chunk_weight, edge_key, edge_id, part_prob,
    source, positions,
    GIVEN: tl.constexpr, NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr, NUM_PARTS: tl.constexpr,
    EACH: tl.constexpr, RACE_SPAN: tl.constexpr,
):  # fmt: skip
    """int64, of a row with a temperature. EACH: parts of a block. RACE_SPAN: a power of 2, at least the blocks."""
    word = row_word(source, positions, row, GIVEN)
    blocks = tl.arange(0, RACE_SPAN)
    parts = blocks[:, None] * EACH + tl.arange(0, EACH)[None, :]
    sums = tl.sum(tl.load(part_prob + row * NUM_PARTS + parts, mask=parts < NUM_PARTS, other=0), 1)
    block = _first(arrivals(word, blocks + _BLOCK), sums, blocks, RACE_SPAN)
    places = tl.arange(0, _BLOCK)
    fixed_probs = kept_probs(
        row, block * _BLOCK + places, logits, stride, width, largest, temperature, log_min_p, chunk_weight,
        edge_key, edge_id, NUM_CHUNKS, SPAN,
    )  # fmt: skip
    return (block * _BLOCK + _first(arrivals(word, places), fixed_probs, places, _BLOCK)).to(tl.int64)


@jit
def _draw(
    logits, stride, width, largest, best, temperature, log_min_p, chunk_weight, edge_key, edge_id, part_prob,
    source, positions, chosen,
    GIVEN: tl.constexpr, NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr, NUM_PARTS: tl.constexpr,
    EACH: tl.constexpr, RACE_SPAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    token_id = tl.load(best + row)
    if (token_id >= 0) & (tl.load(temperature + row) > 0):
        token_id = drawn(
            row, logits, stride, width, largest, temperature, log_min_p, chunk_weight, edge_key, edge_id,
            part_prob, source, positions, GIVEN, NUM_CHUNKS, SPAN, NUM_PARTS, EACH, RACE_SPAN,
        )  # fmt: skip
    tl.store(chosen + row, token_id)


@jit
def _draw_draft(
    logits, stride, width, largest, best, temperature, log_min_p, chunk_weight, edge_key, edge_id, part_prob,
    source, positions, best_margin, chosen, margins,
    GIVEN: tl.constexpr, NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr, NUM_PARTS: tl.constexpr,
    EACH: tl.constexpr, RACE_SPAN: tl.constexpr,
):  # fmt: skip
    """margins: float32, a scaled logit minus the largest other: below 0 unless the token is the most likely."""
    row = tl.program_id(0)
    best_id, margin, warmth = tl.load(best + row), tl.load(best_margin + row), tl.load(temperature + row)
    token_id = best_id
    if (best_id >= 0) & (warmth > 0):
        token_id = drawn(
            row, logits, stride, width, largest, temperature, log_min_p, chunk_weight, edge_key, edge_id,
            part_prob, source, positions, GIVEN, NUM_CHUNKS, SPAN, NUM_PARTS, EACH, RACE_SPAN,
        )  # fmt: skip
        behind = tl.load(logits + row.to(tl.int64) * stride + token_id) - tl.load(largest + row)
        margin = tl.div_rn(tl.where(token_id == best_id, margin, behind), warmth)
    tl.store(chosen + row, token_id)
    tl.store(margins + row, margin)


def draw_tokens(shaped: SamplingInputs, space: SamplingWorkspace, chosen: Tensor) -> None:
    """Fill chosen [R] int64; with `best` where a row has no temperature or no token.

    space: best, largest, chunk_weight, the edges and part_prob of these rows.
    """
    if shaped.num_rows:
        _draw[(shaped.num_rows,)](
            *space.prob_arguments(shaped), space.part_prob, *shaped.noise, chosen, GIVEN=shaped.has_noise,
            **space.race_sizes, **EXACT,
        )  # fmt: skip


def draw_drafts(shaped: SamplingInputs, space: SamplingWorkspace, chosen: Tensor, margins: Tensor) -> None:
    """Fill chosen [R] int64 as draw_tokens, and margins [R] float32; those of `best` where that is taken.

    space: as in draw_tokens, and margin.
    """
    if shaped.num_rows:
        _draw_draft[(shaped.num_rows,)](
            *space.prob_arguments(shaped), space.part_prob, *shaped.noise, space.margin, chosen, margins,
            GIVEN=shaped.has_noise, **space.race_sizes, **EXACT,
        )  # fmt: skip
