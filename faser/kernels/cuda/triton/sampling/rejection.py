"""Rejection sampling of drafts: each draft token is accepted or rejected by its own two probabilities.

Leviathan et al., arXiv:2211.17192, algorithm 1, bit for bit as engine/execution/verifiers/rejection.py has it: p
there is the target's fixed-point probability, q the probability the token was drawn with. Rows lie as in
kernels/interface/sampling/rejection_kernels.py:

    row             |  0    1    2    |   3   |   4     5    |
    drafted         |  x_1  x_2   -   |   -   |   x_1   -    |
    draft_probs     |  0    1         |       |   2          |   line of row r of sequence s: r - s

The residual (p - q)+ takes two passes: sums by chunk of the one row of each sequence that needs it, then the chunk
that contains the random number. Three launches for all sequences, no wait for the device. Knows nothing of logits.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from faser.errors import EngineError
from faser.kernels.cuda.triton.common import EXACT, expect, expect_lines, jit, next_power_of_2
from faser.kernels.cuda.triton.sampling import noise
from faser.kernels.cuda.triton.sampling.fixed_point import NO_ID, PROB_ONE, exceeding, row_sum, threshold
from faser.kernels.cuda.triton.sampling.noise import uniform
from faser.kernels.cuda.triton.sampling.workspace import SamplingWorkspace
from faser.kernels.interface.sampling.sampling_metadata import DeviceSamplingMetadata

_ACCEPT = tl.constexpr(noise.ACCEPT)
_REPLACE = tl.constexpr(noise.REPLACE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledDrafts:
    """S sequences, R rows, T = R - S draft tokens.

    drafted: [R] int64, NO_TOKEN in the last row of a sequence. draft_probs: [T, V] float64 or float32, each row
    contiguous. first_row: [S + 1] int32, R at the end; each sequence has from 1 to max_draft + 1 rows.
    """

    drafted: Tensor
    draft_probs: Tensor
    first_row: Tensor
    max_draft: int


@jit
def _judge(
    fixed_probs, stride, chunk_prob, drafted, draft_probs, draft_stride, first_row, seeds, positions, num_accepted,
    SPAN_ROWS: tl.constexpr, NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0)
    begin = tl.load(first_row + s)
    num_rows = tl.load(first_row + s + 1) - begin
    i = tl.arange(0, SPAN_ROWS)
    judging = i < num_rows - 1
    row = (begin + i).to(tl.int64)
    draft = tl.load(drafted + row, mask=judging, other=0)
    chunk = tl.arange(0, SPAN)[None, :]
    within = judging[:, None] & (chunk < NUM_CHUNKS)
    totals = tl.sum(tl.load(chunk_prob + row[:, None] * NUM_CHUNKS + chunk, mask=within, other=0), 1)
    mass = tl.load(fixed_probs + row * stride + draft, mask=judging, other=0.0).to(tl.float64)
    target_prob = mass / tl.where(totals > 0, totals, 1).to(tl.float64)
    draft_prob = tl.load(draft_probs + (row - s) * draft_stride + draft, mask=judging, other=0.0).to(tl.float64)
    position = tl.load(positions + row, mask=judging, other=0)
    start = tl.zeros_like(position) + tl.load(positions + begin)
    number = uniform(
        tl.load(seeds + row, mask=judging, other=0), position, tl.zeros_like(position) + _ACCEPT, start
    )
    ratio = target_prob / tl.where(draft_prob > 0, draft_prob, 1.0)
    accepted = judging & (draft_prob > 0) & (number < ratio)
    tl.store(num_accepted + s, tl.min(tl.where(accepted, SPAN_ROWS, i)))


@jit
def _left_probs(fixed_probs, stride, draft_probs, draft_stride, total, row, line, columns, width):
    """int64 of these columns of a row: (target_probs - draft_probs)+ and target_probs, in units of 2**-52."""
    inside = columns < width
    mass = tl.load(fixed_probs + row * stride + columns, mask=inside, other=0.0).to(tl.float64)
    target_probs = mass / tl.where(total > 0, total, 1).to(tl.float64)
    probs = tl.load(draft_probs + line * draft_stride + columns, mask=inside, other=0.0).to(tl.float64)
    left = target_probs - probs
    residual = tl.floor(tl.where(left > 0, left, 0.0) * PROB_ONE)
    return residual.to(tl.int64), tl.floor(target_probs * PROB_ONE).to(tl.int64)


@jit
def _residual_sums(
    fixed_probs, stride, width, chunk_prob, draft_probs, draft_stride, first_row, num_accepted, chunk_residual,
    chunk_target,
    NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    s, chunk = tl.program_id(0), tl.program_id(1)
    row = (tl.load(first_row + s) + tl.load(num_accepted + s)).to(tl.int64)
    if row + 1 < tl.load(first_row + s + 1):
        columns = chunk * BLOCK + tl.arange(0, BLOCK)
        residual, target = _left_probs(
            fixed_probs, stride, draft_probs, draft_stride, row_sum(chunk_prob, row, NUM_CHUNKS, SPAN), row,
            row - s, columns, width,
        )  # fmt: skip
        tl.store(chunk_residual + s * NUM_CHUNKS + chunk, tl.sum(residual))
        tl.store(chunk_target + s * NUM_CHUNKS + chunk, tl.sum(target))


@jit
def _draw_final(
    fixed_probs, stride, width, best, chunk_prob, draft_probs, draft_stride, first_row, num_accepted,
    chunk_residual, chunk_target, seeds, positions, final_ids,
    NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The bonus token after a draft that is accepted whole, as without speculation; else the recovered token.

    A residual that is empty, because the two distributions differ by rounding only, is replaced by the target's
    probabilities.
    """
    s = tl.program_id(0)
    row = (tl.load(first_row + s) + tl.load(num_accepted + s)).to(tl.int64)
    token_id = tl.load(best + row)
    if token_id >= 0:
        is_whole = row + 1 == tl.load(first_row + s + 1)
        chunks = tl.arange(0, SPAN)
        there = chunks < NUM_CHUNKS
        sums = tl.load(chunk_prob + row * NUM_CHUNKS + chunks, mask=there, other=0)
        total = tl.sum(sums)
        residual_sums = tl.load(chunk_residual + s * NUM_CHUNKS + chunks, mask=there & (is_whole == 0), other=0)
        target_sums = tl.load(chunk_target + s * NUM_CHUNKS + chunks, mask=there & (is_whole == 0), other=0)
        has_residual = tl.sum(residual_sums) > 0
        sums = tl.where(is_whole, sums, tl.where(has_residual, residual_sums, target_sums))
        position = tl.load(positions + row)
        purpose = tl.where(is_whole, position * 0, position * 0 + _REPLACE)
        limit = threshold(uniform(tl.load(seeds + row), position, purpose, position * 0), tl.sum(sums))
        chunk, before = exceeding(sums, limit)
        columns = chunk * BLOCK + tl.arange(0, BLOCK)
        if is_whole:
            values = tl.load(fixed_probs + row * stride + columns, mask=columns < width, other=0.0).to(tl.int64)
        else:
            residual, target = _left_probs(
                fixed_probs, stride, draft_probs, draft_stride, total, row, row - s, columns, width
            )
            values = tl.where(has_residual, residual, target)
        inside, _ = exceeding(values, limit - before)
        token_id = (chunk * BLOCK + inside).to(tl.int64)
    else:
        token_id = token_id * 0 + NO_ID
    tl.store(final_ids + s, token_id)


def judge_sampled(
    fixed_probs: Tensor,
    rows: DeviceSamplingMetadata,
    drafts: SampledDrafts,
    space: SamplingWorkspace,
    num_accepted: Tensor,
    final_ids: Tensor,
) -> None:
    """Fill num_accepted [S] int32, draft tokens before the first rejected one, and final_ids [S] int64.

    fixed_probs: [R, V] float32, written by TokenKernels.fixed_point_probs in place of the logits, with this
    `space` since. A row without a token accepts nothing and gives NO_TOKEN. rows: only seeds and positions are
    read. Raises EngineError for tensors that do not fit; the values of first_row are not checked, because they are
    on the device.
    """
    num_rows, width = fixed_probs.shape
    num_sequences = len(drafts.first_row) - 1
    if drafts.max_draft < 0:
        raise EngineError(f"max_draft is {drafts.max_draft}; the least is 0")
    space.expect_room(num_rows, width)
    expect_lines("fixed_probs", fixed_probs, (num_rows, width), torch.float32, like=fixed_probs)
    expect("drafted", drafts.drafted, (num_rows,), torch.int64, like=fixed_probs)
    num_drafted = num_rows - num_sequences
    expect_lines(
        "draft_probs", drafts.draft_probs, (num_drafted, width), torch.float64, torch.float32, like=fixed_probs
    )
    expect("first_row", drafts.first_row, (num_sequences + 1,), torch.int32, like=fixed_probs)
    expect("seeds", rows.seeds, (num_rows,), torch.int64, like=fixed_probs)
    expect("positions", rows.positions, (num_rows,), torch.int64, like=fixed_probs)
    expect("num_accepted", num_accepted, (num_sequences,), torch.int32, like=fixed_probs)
    expect("own", final_ids, (num_sequences,), torch.int64, like=fixed_probs)
    if not num_sequences:
        return
    probs = (drafts.draft_probs, drafts.draft_probs.stride(0))
    where = (fixed_probs, fixed_probs.stride(0))
    sizes = {"NUM_CHUNKS": space.num_chunks, "SPAN": space.span}
    _judge[(num_sequences,)](
        *where, space.chunk_prob, drafts.drafted, *probs, drafts.first_row, rows.seeds, rows.positions,
        num_accepted, SPAN_ROWS=next_power_of_2(drafts.max_draft + 1), **sizes, **EXACT,
    )  # fmt: skip
    _residual_sums[(num_sequences, space.num_chunks)](
        *where, width, space.chunk_prob, *probs, drafts.first_row, num_accepted, space.chunk_residual,
        space.chunk_target, **sizes, BLOCK=space.block, **EXACT,
    )  # fmt: skip
    _draw_final[(num_sequences,)](
        *where, width, space.best, space.chunk_prob, *probs, drafts.first_row, num_accepted, space.chunk_residual,
        space.chunk_target, rows.seeds, rows.positions, final_ids, **sizes, BLOCK=space.block, **EXACT,
    )  # fmt: skip
