"""Samplers of draft tokens from logits: the most likely one, a prediction, or one drawn at random.

All report a confidence in nats: by how much the token's logit exceeds the best other one. The logits are raw: the
target's logits processors do not run on them, which costs acceptance and never exactness. What a request asked for
is read from the sampler's SamplingState. The arithmetic is that of SamplingKernels, by tensor operations where no
other kernels are given. The last sampler stands around another one and samples in the smaller
vocabulary of a head.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.execution.sampling.distribution import draw
from faser.engine.execution.sampling.kernels import TORCH_SAMPLING, race
from faser.engine.execution.sampling.parameters import Purpose, SamplingState, noise_words
from faser.engine.execution.sampling.tokens import SampledTokens, draft_on_host
from faser.kernels.interface.sampling import SamplingKernels, SamplingMetadata
from faser.optional import or_else
from faser.types.arrays import NO_TOKEN, Floats, Ints, Words

_CERTAIN = 100.0  # nats; larger margins, and infinite ones, carry no more information
_WITHOUT_NUMBERS = 0  # the draft token where logits are not numbers: one is as good as another


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTokens:
    """A token per row. token_ids: [R] int64. margins: [R] float64, -100 … 100 nats; 0 where logits are no numbers.

    probs: [R, V] float64, exactly what each token was drawn from; None where tokens are point masses.
    """

    token_ids: NDArray[np.int64]
    margins: NDArray[np.float64]
    probs: Tensor | None = None

    def among(self, rows: Ints) -> "DraftTokens":
        """The point masses of these rows."""
        return DraftTokens(token_ids=self.token_ids[rows], margins=self.margins[rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRows:
    """The rows that get a draft token, [R] each. positions: of the tokens.

    draft_starts: positions of the first tokens of their drafts.
    """

    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    draft_starts: NDArray[np.int64]


class DraftSampler(Protocol):
    """Samples draft tokens."""

    @property
    def draws(self) -> bool:
        """Return whether tokens are drawn from probabilities, which are returned; else they are point masses."""
        ...

    def choose(self, logits: Tensor, rows: DraftRows, ids: Ints | None = None) -> DraftTokens:
        """A token for every row; any where the logits are not numbers. logits: [R, V] float32, not written to.

        ids: as token_ids of SamplingKernels.predict.
        """
        ...


def draft_tokens(token_ids: Ints, margins: Floats) -> DraftTokens:
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
    """Numbers by which the tokens of S drafts are predicted: sequences' metadata, and random words [S, width].

    None: every token is the most likely one.
    """

    metadata: SamplingMetadata | None = None
    noise: Words | None = None


_MOST_LIKELY = TokensAhead()


class PointMassSampler(DraftSampler, Protocol):
    """A sampler of point masses. All that it needs is known ahead, so a runner can draft where its logits are."""

    def metadata(self, slots: Ints, positions: Ints) -> SamplingMetadata:
        """Return what a runner needs to draft tokens at these positions of these slots. positions: not copied."""
        ...

    def ahead(self, slots: Ints, draft_starts: Ints, width: int) -> TokensAhead:
        """For drafts of up to `width` tokens."""
        ...


class GreedyDraftSampler:
    """The most likely token, whatever the request's temperature: a draft is a function of the tokens before it."""

    draws = False

    def __init__(self, kernels: SamplingKernels | None = None) -> None:
        self._kernels = or_else(kernels, TORCH_SAMPLING)

    def choose(self, logits: Tensor, _rows: DraftRows, _ids: Ints | None = None) -> DraftTokens:
        return draft_tokens(*draft_on_host(self._kernels, logits, None))

    def metadata(self, _slots: Ints, positions: Ints) -> SamplingMetadata:
        return SamplingMetadata.greedy(positions)

    def ahead(self, _slots: Ints, _draft_starts: Ints, _width: int) -> TokensAhead:
        return _MOST_LIKELY


class SampleAndMatchDraftSampler:
    """The token that the request would get if the draft model were the target.

    The target draws its token by a race, with random numbers of the request, the position and the token alone. The
    draft model's tokens run the same race after the request's temperature and truncation, so the same token wins
    unless the two models differ about one of the first to arrive.

    A draft is still a function of the tokens before it, the request's seed and the position, which is all that
    the target's sampling depends on: so it is a point mass, any prefix of it is exact, and no token of an answer
    depends on it. Source of the idea: drafter-invariant speculative decoding, arXiv 2408.07978.

    The confidence is the margin of the draft token. A request with temperature 0 gets the most likely token.
    """

    draws = False

    def __init__(self, state: SamplingState, *, kernels: SamplingKernels | None = None) -> None:
        self._state = state
        self._kernels = or_else(kernels, TORCH_SAMPLING)

    def choose(self, logits: Tensor, rows: DraftRows, ids: Ints | None = None) -> DraftTokens:
        metadata = self.metadata(rows.slots, rows.positions) if self._state.any_random(rows.slots) else None
        return draft_tokens(*draft_on_host(self._kernels, logits, metadata, ids))

    def metadata(self, slots: Ints, positions: Ints) -> SamplingMetadata:
        return self._state.metadata(slots, positions)

    def ahead(self, slots: Ints, draft_starts: Ints, width: int) -> TokensAhead:
        if not self._state.any_random(slots):
            return _MOST_LIKELY
        positions = (draft_starts[:, None] + np.arange(width)).ravel()
        seeds = np.repeat(self._state.seed[slots], width)
        noise = noise_words(seeds, positions, Purpose.TOKEN, generate=self._kernels.philox)
        return TokensAhead(
            metadata=self._state.metadata(slots, draft_starts), noise=noise.reshape(len(slots), width)
        )


class ProbabilisticDraftSampler:
    """A token drawn from softmax(logits / the request's temperature); the most likely one where that is 0.

    The noise is a function of (request seed, position, draft), made of numbers that no verifier uses.
    """

    draws = True

    def __init__(self, state: SamplingState, *, kernels: SamplingKernels | None = None) -> None:
        self._state = state
        self._kernels = or_else(kernels, TORCH_SAMPLING)

    def choose(self, logits: Tensor, rows: DraftRows, ids: Ints | None = None) -> DraftTokens:
        token_ids, margins = self._kernels.best_and_margin(logits)
        weights = logits.clone()
        drawn = self._state.is_random(rows.slots) & (token_ids != NO_TOKEN)
        if len(at := np.flatnonzero(drawn)):
            token_ids[at] = self._draw(weights, at, token_ids[at], rows, ids)
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

    def _draw(self, logits: Tensor, at: Ints, best: Ints, rows: DraftRows, ids: Ints | None) -> Ints:
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
        noise = noise_words(seeds, positions, Purpose.DRAFT, rows.draft_starts[at], self._kernels.philox)
        self._kernels.fixed_point_probs(logits, at, best, metadata)
        probs = logits if len(at) == len(logits) else logits[at]
        width = logits.shape[-1] if ids is None else int(ids[-1]) + 1
        columns = None if ids is None else torch.from_numpy(ids).to(logits.device)
        token_ids: Ints = draw(probs, race(noise, width, logits.device), columns).numpy(force=True)
        return token_ids


class DraftVocabularySampler:
    """Samples in a vocabulary that is a part of the target's. logits of `choose`: [R, Vd]; its tokens: of V.

    The other sampler gets the small vocabulary in the order of the target's ids, and the ids. So ties and the race
    are as in the whole vocabulary, with a probability of 0 for all other tokens.

    draft_ids: [Vd] int64, the target's id of each token of the small vocabulary, each once. vocab_size: V.
    """

    def __init__(self, sampler: DraftSampler, draft_ids: Tensor, vocab_size: int) -> None:
        self._sampler = sampler
        self._vocab_size = vocab_size
        ordered, order = draft_ids.cpu().sort()
        self._order = None if torch.equal(ordered, draft_ids.cpu()) else order.to(draft_ids.device)
        self._draft_ids = ordered.to(draft_ids.device)
        self._ids = ordered.numpy()

    @property
    def in_order(self) -> bool:
        """The small vocabulary is in the order of the target's ids as it is."""
        return self._order is None

    @property
    def draws(self) -> bool:
        return self._sampler.draws

    def choose(self, logits: Tensor, rows: DraftRows, _ids: Ints | None = None) -> DraftTokens:
        if self._order is not None:
            logits = logits.index_select(1, self._order)
        found = self._sampler.choose(logits, rows, self._ids)
        probs = found.probs
        if probs is not None:
            whole = probs.new_zeros(len(probs), self._vocab_size)
            probs = whole.index_copy_(1, self._draft_ids, probs)
        return replace(found, token_ids=self._ids[found.token_ids], probs=probs)
