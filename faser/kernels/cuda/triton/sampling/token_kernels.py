"""Tokens, draft tokens, or the fixed-point probabilities that tokens are drawn from, all from logits.

The same results, bit for bit, as engine/execution/sampling/distribution.py defines them, without a wait for the
device: a row that has no token gets NO_TOKEN. Launches, for any number of rows:

    no row has a temperature      2
    some row has one              5; 5 more for top_k, 6 for top_p

Only the first two launches work on rows without a temperature. Knows nothing of acceptance.
"""

import torch
import triton.language as tl
from torch import Tensor

from faser.kernels.cuda.triton.common import EXACT, expect, jit
from faser.kernels.cuda.triton.sampling.best import find_best
from faser.kernels.cuda.triton.sampling.draws import draw_drafts, draw_tokens
from faser.kernels.cuda.triton.sampling.fixed_point import PROB_ONE, kept_probs, scaled_logits, whole_weights
from faser.kernels.cuda.triton.sampling.truncation import find_edges
from faser.kernels.cuda.triton.sampling.workspace import SamplingInputs, SamplingWorkspace


@jit
def _chunk_weights(
    logits, stride, width, largest, best, temperature, chunk_weight, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    warmth = tl.load(temperature + row)
    if (tl.load(best + row) >= 0) & (warmth > 0):
        columns = chunk * BLOCK + tl.arange(0, BLOCK)
        scaled = scaled_logits(logits + row.to(tl.int64) * stride, columns, width, tl.load(largest + row), warmth)
        total = tl.sum(tl.where(columns < width, whole_weights(scaled), 0))
        tl.store(chunk_weight + row * NUM_CHUNKS + chunk, total)


@jit
def _chunk_probs(
    logits, stride, width, largest, best, temperature, log_min_p, chunk_weight, edge_key, edge_id, chunk_prob,
    part_prob,
    NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """Sums of fixed-point probabilities by chunk, and by part of a chunk. PART: columns of one.

    WRITE: store them in place of the logits, also in greedy rows.
    """
    row, chunk = tl.program_id(0), tl.program_id(1)
    token_id = tl.load(best + row)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    if (token_id >= 0) & (tl.load(temperature + row) > 0):
        fixed_probs = kept_probs(
            row, columns, logits, stride, width, largest, temperature, log_min_p, chunk_weight, edge_key, edge_id,
            NUM_CHUNKS, SPAN,
        )  # fmt: skip
    else:
        fixed_probs = tl.where(columns == token_id, PROB_ONE, 0).to(tl.int64)
    sums = tl.sum(tl.reshape(fixed_probs, (BLOCK // PART, PART)), 1)
    first = (row * NUM_CHUNKS + chunk) * (BLOCK // PART)
    tl.store(part_prob + first + tl.arange(0, BLOCK // PART), sums)
    tl.store(chunk_prob + row * NUM_CHUNKS + chunk, tl.sum(sums))
    if WRITE:
        tl.store(logits + row.to(tl.int64) * stride + columns, fixed_probs.to(tl.float32), mask=columns < width)


class TokenKernels:
    """Samples on the device. space: large enough for the rows; it holds the intermediate results of the last call.

    random, top_k, top_p, here and below: at least one row has a temperature, a top_k or a top_p; where one is
    False, the rows' numbers for it are not read. All methods raise EngineError for tensors that do not fit.
    """

    def __init__(self, space: SamplingWorkspace) -> None:
        self.space = space

    def best(self, logits: Tensor, chosen: Tensor, margins: Tensor) -> None:
        """Fill chosen [R] int64 and margins [R] float32, as SamplingKernels.best_and_margin.

        logits: [R, V] float32.
        """
        _expect_results(logits, chosen, margins)
        find_best(logits, self.space, chosen, margins)

    def choose(
        self, shaped: SamplingInputs, chosen: Tensor, *, top_k: bool, top_p: bool, random: bool = True
    ) -> Tensor:
        """Fill chosen [R] int64 with a token of each row; NO_TOKEN where there is none.

        Does not write the logits.
        """
        expect("chosen", chosen, (shaped.num_rows,), torch.int64, like=shaped.logits)
        if not random:
            find_best(shaped.logits, self.space, chosen, self.space.margin)
            return chosen
        self._weigh(shaped, top_k=top_k, top_p=top_p)
        draw_tokens(shaped, self.space, chosen)
        return chosen

    def draft(
        self,
        shaped: SamplingInputs,
        chosen: Tensor,
        margins: Tensor,
        *,
        top_k: bool,
        top_p: bool,
        random: bool = True,
    ) -> None:
        """Fill chosen [R] int64 and margins [R] float32 as SamplingKernels.predict; greedy rows as `best`.

        NO_TOKEN and 0 where the row has no token. Does not write the logits.
        """
        if not random:
            self.best(shaped.logits, chosen, margins)
            return
        _expect_results(shaped.logits, chosen, margins)
        self._weigh(shaped, top_k=top_k, top_p=top_p)
        draw_drafts(shaped, self.space, chosen, margins)

    def fixed_point_probs(self, shaped: SamplingInputs, *, top_k: bool, top_p: bool) -> None:
        """Store fixed-point probabilities in place of the logits; their sums by chunk are in space.chunk_prob.

        A row without a temperature has a single nonzero one, a row that is NO_TOKEN in space.best none.
        """
        self._weigh(shaped, top_k=top_k, top_p=top_p)
        self._sum_probs(shaped, write=True)

    def _weigh(self, shaped: SamplingInputs, *, top_k: bool, top_p: bool) -> None:
        """Find the most likely tokens, the edges of the truncation, and the sums of the kept probabilities."""
        shaped.check()
        space = self.space
        find_best(shaped.logits, space, space.best, space.margin)
        if not shaped.num_rows:
            return
        _chunk_weights[(shaped.num_rows, space.num_chunks)](
            shaped.logits, shaped.stride, shaped.width, space.largest, space.best, shaped.rows.temperature,
            space.chunk_weight, NUM_CHUNKS=space.num_chunks, BLOCK=space.block, **EXACT,
        )  # fmt: skip
        if top_k:
            find_edges(shaped, space, by_prob=False)
        self._sum_probs(shaped, write=False)
        if top_p:
            find_edges(shaped, space, by_prob=True)
            self._sum_probs(shaped, write=False)

    def _sum_probs(self, shaped: SamplingInputs, *, write: bool) -> None:
        if shaped.num_rows:
            space = self.space
            _chunk_probs[(shaped.num_rows, space.num_chunks)](
                *space.prob_arguments(shaped), space.chunk_prob, space.part_prob, WRITE=write, PART=space.part,
                **space.sizes, **EXACT,
            )  # fmt: skip


def _expect_results(logits: Tensor, chosen: Tensor, margins: Tensor) -> None:
    expect("chosen", chosen, (len(logits),), torch.int64, like=logits)
    expect("margins", margins, (len(logits),), torch.float32, like=logits)
