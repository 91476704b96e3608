"""A token of each row: the one at which the running sum of probabilities passes the row's random number."""

import triton.language as tl
from torch import Tensor

from faser.kernels.cuda.triton.common import EXACT, jit
from faser.kernels.cuda.triton.sampling.fixed_point import exceeding, kept_probs, threshold
from faser.kernels.cuda.triton.sampling.noise import row_number
from faser.kernels.cuda.triton.sampling.workspace import SamplingInputs, SamplingWorkspace


@jit
def drawn(
    row, logits, stride, width, largest, temperature, log_min_p, chunk_weight, edge_key, edge_id, chunk_prob,
    source, positions,
    GIVEN: tl.constexpr, NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """int64, of a row with a temperature: the first token at which the sum exceeds number times total."""
    chunks = tl.arange(0, SPAN)
    sums = tl.load(chunk_prob + row * NUM_CHUNKS + chunks, mask=chunks < NUM_CHUNKS, other=0)
    limit = threshold(row_number(source, positions, row, GIVEN), tl.sum(sums))
    chunk, before = exceeding(sums, limit)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    fixed_probs = kept_probs(
        row, columns, logits, stride, width, largest, temperature, log_min_p, chunk_weight, edge_key, edge_id,
        NUM_CHUNKS, SPAN,
    )  # fmt: skip
    inside, _ = exceeding(fixed_probs, limit - before)
    return (chunk * BLOCK + inside).to(tl.int64)


@jit
def _draw(
    logits, stride, width, largest, best, temperature, log_min_p, chunk_weight, edge_key, edge_id, chunk_prob,
    source, positions, chosen,
    GIVEN: tl.constexpr, NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    token_id = tl.load(best + row)
    if (token_id >= 0) & (tl.load(temperature + row) > 0):
        token_id = drawn(
            row, logits, stride, width, largest, temperature, log_min_p, chunk_weight, edge_key, edge_id,
            chunk_prob, source, positions, GIVEN, NUM_CHUNKS, SPAN, BLOCK,
        )  # fmt: skip
    tl.store(chosen + row, token_id)


def draw_tokens(shaped: SamplingInputs, space: SamplingWorkspace, chosen: Tensor) -> None:
    """Fill chosen [R] int64; with `best` where a row has no temperature or no token.

    space: best, largest, chunk_weight, the edges and chunk_prob of these rows.
    """
    if shaped.num_rows:
        _draw[(shaped.num_rows,)](
            *space.prob_arguments(shaped), space.chunk_prob, *shaped.noise, chosen, GIVEN=shaped.has_uniforms,
            **space.sizes, **EXACT,
        )  # fmt: skip
