"""How a draft model's logits become a draft token: the most likely one, a prediction, or one drawn at random.

All report a confidence in nats: by how much the token's logit exceeds the best other one. The logits are raw: the
target's logits processors do not run on them, which costs acceptance and never exactness. What a request asked for
is read from the sampler's SamplingState. The arithmetic is that of SamplingKernels, by tensor operations where no
other kernels are given.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.execution.sampling.distribution import draw
from faser.engine.execution.sampling.noise import Purpose, uniforms
from faser.engine.execution.sampling.ranking import leading
from faser.engine.execution.sampling.state import SamplingState
from faser.engine.execution.sampling.token_samplers import SampledTokens, draft_on_host
from faser.engine.execution.sampling.torch_kernels import TorchSamplingKernels
from faser.kernels.interface.sampling.sampling_kernels import NO_TOKEN, Ints, Reals, SamplingKernels
from faser.kernels.interface.sampling.sampling_metadata import SamplingMetadata

WINDOW = 0.05  # about how far the draft model's tokens lie from the target's
_CERTAIN = 100.0  # nats; larger margins, and infinite ones, carry no more information
_WITHOUT_NUMBERS = 0  # the draft token where logits are not numbers: one is as good as another


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTokens:
    """A token per row. token_ids: [R] int64. margins: [R] float64, -100 … 100 nats; 0 where logits are no numbers.

    probs: [R, V] float64, exactly what each token was drawn from; None where tokens are point masses.
    top_ids: [R, M] int64, the likeliest tokens in any order; None unless the sampler gives them.
    """

    token_ids: NDArray[np.int64]
    margins: NDArray[np.float64]
    probs: Tensor | None = None
    top_ids: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRows:
    """The rows that get a draft token, [R] each. positions: of the tokens.

    draft_starts: positions of the first tokens of their drafts. wants_top_ids: the likeliest tokens are to be
    named as well, by a sampler that can.
    """

    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    draft_starts: NDArray[np.int64]
    wants_top_ids: bool = False


class DraftSampler(Protocol):
    """Samples draft tokens."""

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn from probabilities, which are then returned; else they are point masses."""
        ...

    def choose(self, logits: Tensor, rows: DraftRows) -> DraftTokens:
        """A token for every row; any where the logits are not numbers. logits: [R, V] float32, not written to."""
        ...


class RunnerDraftSampler(DraftSampler, Protocol):
    """A sampler of point masses whose tokens a runner can draft where its logits are; see Runner.guess."""

    @property
    def window(self) -> float:
        """As in Runner.guess; without effect where all temperatures are 0."""
        ...

    def metadata(self, slots: Ints, positions: Ints) -> SamplingMetadata:
        """What the runner needs to draft tokens at these positions of these slots. positions: kept, not copied."""
        ...


def draft_tokens(token_ids: Ints, margins: Reals) -> DraftTokens:
    """Point masses. token_ids, margins: as SamplingKernels gives them, NO_TOKEN and infinities among them."""
    return DraftTokens(
        token_ids=np.maximum(token_ids, _WITHOUT_NUMBERS),
        margins=np.minimum(np.maximum(margins, -_CERTAIN), _CERTAIN),
    )


def drafted_by_runner(sampled: SampledTokens) -> DraftTokens:
    """The draft tokens that a runner has sampled itself: what `choose` makes of the same logits."""
    assert sampled.margins is not None, "a draft token has a margin"
    return draft_tokens(sampled.token_ids, sampled.margins)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensAhead:
    """How the tokens of S drafts are predicted: each sequence's metadata, and [S, width] numbers, float64."""

    metadata: SamplingMetadata
    uniforms: Reals


class PredictingSampler(RunnerDraftSampler, Protocol):
    """A sampler of point masses, of which all that it needs is known before the first token is drafted."""

    def ahead(self, slots: Ints, draft_starts: Ints, width: int) -> TokensAhead | None:
        """For drafts of up to `width` tokens. None: every token is the most likely one."""
        ...


class GreedyDraftSampler:
    """The most likely token, whatever the request's temperature: a draft is a function of the tokens before it."""

    draws = False
    window = WINDOW

    def __init__(self, kernels: SamplingKernels | None = None) -> None:
        self._kernels = TorchSamplingKernels() if kernels is None else kernels

    def choose(self, logits: Tensor, _rows: DraftRows) -> DraftTokens:
        return draft_tokens(*draft_on_host(self._kernels, logits, None, self.window))

    def metadata(self, _slots: Ints, positions: Ints) -> SamplingMetadata:
        return SamplingMetadata.greedy(positions)

    def ahead(self, _slots: Ints, _draft_starts: Ints, _width: int) -> None:
        return


class SampleAndMatchDraftSampler:
    """The likeliest prediction of the token that the target will draw, given the number it will draw it with.

    The target lays its tokens along [0, 1], each as long as it is likely, and takes the one in which the number of
    this request and position falls. The draft model's tokens lie nearly there, so the prediction is the one with
    most probability within `window` of the number, after the request's temperature and truncation. With a window
    of 0 it is what the request would get if the draft model were the target; with 1 it is the most likely token.

    A draft is still a function of the tokens before it, the request's seed and the position, which is all that
    the target's sampling depends on: so it is a point mass, any prefix of it is exact, and no token of an answer
    depends on it. Source of the idea: drafter-invariant speculative decoding, arXiv 2408.07978.

    The confidence is the margin of the draft token. A request with temperature 0 gets the most likely token.
    """

    draws = False

    def __init__(
        self, state: SamplingState, *, window: float = WINDOW, kernels: SamplingKernels | None = None
    ) -> None:
        self.window = window
        self._state = state
        self._kernels = TorchSamplingKernels() if kernels is None else kernels

    def choose(self, logits: Tensor, rows: DraftRows) -> DraftTokens:
        metadata = self.metadata(rows.slots, rows.positions) if self._state.any_random(rows.slots) else None
        return draft_tokens(*draft_on_host(self._kernels, logits, metadata, self.window))

    def metadata(self, slots: Ints, positions: Ints) -> SamplingMetadata:
        return self._state.metadata(slots, positions)

    def ahead(self, slots: Ints, draft_starts: Ints, width: int) -> TokensAhead | None:
        if not self._state.any_random(slots):
            return None
        positions = (draft_starts[:, None] + np.arange(width)).ravel()
        seeds = np.repeat(self._state.seed[slots], width)
        noise = uniforms(seeds, positions, Purpose.TOKEN, generate=self._kernels.philox)
        return TokensAhead(
            metadata=self._state.metadata(slots, draft_starts), uniforms=noise.reshape(len(slots), width)
        )


class ProbabilisticDraftSampler:
    """A token drawn from softmax(logits / the request's temperature); the most likely one where that is 0.

    The noise is a function of (request seed, position, draft), made of numbers that no verifier uses.
    """

    draws = True

    def __init__(self, state: SamplingState, *, kernels: SamplingKernels | None = None) -> None:
        self._state = state
        self._kernels = TorchSamplingKernels() if kernels is None else kernels

    def choose(self, logits: Tensor, rows: DraftRows) -> DraftTokens:
        token_ids, margins = self._kernels.best_and_margin(logits)
        weights = logits.clone()
        drawn = self._state.is_random(rows.slots) & (token_ids != NO_TOKEN)
        if len(at := np.flatnonzero(drawn)):
            token_ids[at] = self._draw(weights, at, token_ids[at], rows)
        np.maximum(token_ids, _WITHOUT_NUMBERS, out=token_ids)
        if len(at := np.flatnonzero(~drawn)):
            weights[at] = 0.0
            weights[at, token_ids[at]] = 1.0
        probs = weights.double()
        return DraftTokens(
            token_ids=token_ids,
            margins=np.minimum(margins, _CERTAIN),
            probs=probs.div_(probs.sum(-1, keepdim=True)),
        )

    def _draw(self, logits: Tensor, at: Ints, best: Ints, rows: DraftRows) -> Ints:
        """Tokens of the rows `at`, whose fixed-point probabilities take the place of the logits."""
        slots, positions, off = rows.slots[at], rows.positions[at], np.zeros(len(at))
        seeds = self._state.seed[slots]
        metadata = SamplingMetadata(
            temperature=self._state.temperature[slots],
            min_p=off,
            top_k=off.astype(np.int64),
            top_p=np.ones(len(at)),
            seeds=seeds,
            positions=positions,
        )
        noise = uniforms(seeds, positions, Purpose.DRAFT, rows.draft_starts[at], self._kernels.philox)
        self._kernels.fixed_point_probs(logits, at, best, metadata)
        probs = logits if len(at) == len(logits) else logits[at]
        token_ids: Ints = draw(probs, torch.from_numpy(noise).to(logits.device)).numpy(force=True)
        return token_ids


class WithTopIds:
    """Samples as another draft sampler does, and names the num_top likeliest tokens (fewer in a small vocabulary).

    Only where DraftRows asks for it: to find them takes longer than to sample a token.
    """

    def __init__(self, sampler: DraftSampler, num_top: int) -> None:
        self._sampler = sampler
        self._num_top = num_top

    @property
    def draws(self) -> bool:
        return self._sampler.draws

    def choose(self, logits: Tensor, rows: DraftRows) -> DraftTokens:
        if not rows.wants_top_ids:
            return self._sampler.choose(logits, rows)
        top_ids = leading(logits, self._num_top).token_ids
        return replace(self._sampler.choose(logits, rows), top_ids=top_ids)
