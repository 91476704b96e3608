"""Tokens from logits, guesses at them, or the masses they are drawn from.

The same tokens and masses, bit for bit, as engine/execution/sampling/distribution.py defines them, and not one wait for the device: what
is wrong with a row becomes NO_TOKEN. Launches, for any number of rows:

    no row has a temperature      2
    some row has one              5, 6 for a guess with a window; 10 more for top_k, 11 for top_p

Rows without a temperature are left alone by all that is behind the first two. Knows nothing of drafts.
"""

import torch
import triton.language as tl
from torch import Tensor

from faser.kernels.cuda.triton.common.tensors import EXACT, expect, jit
from faser.kernels.cuda.triton.sampling.best import find_best
from faser.kernels.cuda.triton.sampling.draws import draw_tokens
from faser.kernels.cuda.triton.sampling.draft_tokens import expect_window, draft_drawn, draft_nearest
from faser.kernels.cuda.triton.sampling.fixed_point import PROB_ONE, kept_probs, scaled_logits, whole_weights
from faser.kernels.cuda.triton.sampling.truncation import find_edges
from faser.kernels.cuda.triton.sampling.workspace import SamplingWorkspace, ShapedLogits


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
    NUM_CHUNKS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """Sums of masses by chunk. WRITE: put the masses in place of the logits, also of rows that draw nothing."""
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
    tl.store(chunk_prob + row * NUM_CHUNKS + chunk, tl.sum(fixed_probs))
    if WRITE:
        tl.store(logits + row.to(tl.int64) * stride + columns, fixed_probs.to(tl.float32), mask=columns < width)


class TokenKernels:
    """Chooses tokens on the device. space: for these rows; it holds what was found until the next call.

    random, top_k, top_p, here and below: some row may have a temperature, or ask for these. The caller knows from
    its requests; where it says no, the rows' own numbers are not looked at. All raise EngineError for tensors that
    do not fit.
    """

    def __init__(self, space: SamplingWorkspace) -> None:
        self.space = space

    def best(self, logits: Tensor, chosen: Tensor, margins: Tensor) -> None:
        """chosen: [R] int64, margins: [R] float32, as SamplingKernels.best_and_margin. logits: [R, V] float32."""
        _expect_results(logits, chosen, margins)
        find_best(logits, self.space, chosen, margins)

    def choose(
        self, shaped: ShapedLogits, chosen: Tensor, *, top_k: bool, top_p: bool, random: bool = True
    ) -> Tensor:
        """chosen [R] int64: a token of each row; NO_TOKEN where a NaN is or no finite maximum. Logits stay."""
        expect("chosen", chosen, (shaped.num_rows,), torch.int64, like=shaped.logits)
        if not random:
            find_best(shaped.logits, self.space, chosen, self.space.margin)
            return chosen
        self._weigh(shaped, top_k=top_k, top_p=top_p)
        draw_tokens(shaped, self.space, chosen)
        return chosen

    def draft(
        self,
        shaped: ShapedLogits,
        window: float,
        chosen: Tensor,
        margins: Tensor,
        *,
        top_k: bool,
        top_p: bool,
        random: bool = True,
    ) -> None:
        """chosen: [R] int64, margins: [R] float32, as SamplingKernels.nearest; as `best` where there is no temperature.

        NO_TOKEN and 0 where a NaN is or no finite maximum. Logits stay.
        """
        expect_window(window)
        if not random:
            self.best(shaped.logits, chosen, margins)
            return
        _expect_results(shaped.logits, chosen, margins)
        self._weigh(shaped, top_k=top_k, top_p=top_p)
        if window == 0:
            draft_drawn(shaped, self.space, chosen, margins)
        else:
            draft_nearest(shaped, self.space, window, chosen, margins)

    def fixed_point_probs(self, shaped: ShapedLogits, *, top_k: bool, top_p: bool) -> None:
        """Put the masses in place of the logits; their sums by chunk are in space.chunk_prob.

        A row without a temperature has all its mass at one token, a row that is NO_TOKEN in space.best none.
        """
        self._weigh(shaped, top_k=top_k, top_p=top_p)
        self._sum_probs(shaped, write=True)

    def _weigh(self, shaped: ShapedLogits, *, top_k: bool, top_p: bool) -> None:
        """The most likely tokens, the edges, and the sums of what is kept."""
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

    def _sum_probs(self, shaped: ShapedLogits, *, write: bool) -> None:
        if shaped.num_rows:
            space = self.space
            _chunk_probs[(shaped.num_rows, space.num_chunks)](
                *space.prob_arguments(shaped), space.chunk_prob, WRITE=write, **space.sizes, **EXACT
            )


def _expect_results(logits: Tensor, chosen: Tensor, margins: Tensor) -> None:
    expect("chosen", chosen, (len(logits),), torch.int64, like=logits)
    expect("margins", margins, (len(logits),), torch.float32, like=logits)
