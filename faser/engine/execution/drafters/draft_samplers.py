"""How a draft model's logits become a drafted token: the most likely one, or one drawn at random.

All report a confidence in nats, the margin between the two largest logits or that of the drawn token over the
best other one. The logits are raw: a request's penalties and masks are the target's business, and a draft that
ignores them costs acceptance, never exactness. The arithmetic is SamplingKernels's, by tensor operations where no
other is given.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.sampling.distribution import draw
from faser.engine.execution.sampling.metadata import SamplingMetadata
from faser.engine.execution.sampling.noise import Purpose, uniforms
from faser.engine.execution.sampling.ranking import leading
from faser.engine.execution.sampling.token_samplers import SampledTokens
from faser.engine.execution.sampling.torch_kernels import TorchSamplingKernels
from faser.kernels.interface.sampling_kernels import NO_TOKEN, Ints, Reals, SamplingKernels, TruncationParams

_COLDEST = float(np.finfo(np.float32).tiny)
WINDOW = 0.05  # about how far the draft model's tokens lie from the target's (benchmarks/draft_agreement.py)
_CERTAIN = 100.0  # nats; larger margins, and infinite ones, say no more
_WITHOUT_NUMBERS = 0  # the token drafted where logits are no numbers: one is as good as another


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTokens:
    """A token per row. token_ids: [R] int64. margins: [R] float64, -100 … 100 nats; 0 where logits are no numbers.

    probs: [R, V] float64, exactly what each token was drawn from; None where tokens are point masses.
    top_ids: [R, M] int64, the likeliest tokens in any order; None unless the choice gives them.
    """

    token_ids: NDArray[np.int64]
    margins: NDArray[np.float64]
    probs: Tensor | None = None
    top_ids: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRows:
    """Whose tokens are chosen, [R] each. positions: of the tokens; draft_starts: of their drafts' first ones.

    wants_top_ids: the likeliest tokens are to be named as well, by a choice that can.
    """

    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    draft_starts: NDArray[np.int64]
    wants_top_ids: bool = False


class DraftSampler(Protocol):
    """Chooses drafted tokens. Remembers of a slot only what its request asked for, in arrays of its own."""

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn from probabilities, which then come along; else they are point masses."""
        ...

    def start(self, start: SequenceStart) -> None:
        """A sequence takes over a slot."""
        ...

    def choose(self, logits: Tensor, rows: DraftRows) -> DraftTokens:
        """A token for every row; any where the logits are no numbers. logits: [R, V] float32, not written to."""
        ...


class RunnerDraftSampler(DraftSampler, Protocol):
    """A choice of point masses that a runner makes itself, by `guess`; `guessed` says what came of it."""

    @property
    def window(self) -> float:
        """As in Runner.guess; of no effect where all temperatures are 0."""
        ...

    def requests(self, slots: Ints, positions: Ints) -> SamplingMetadata:
        """What to ask for tokens at these positions of these slots. positions: taken over, not copied."""
        ...


def guessed(choices: SampledTokens) -> DraftTokens:
    """Guesses of a runner as drafted tokens: what `choose` makes of the same logits."""
    assert choices.leads is not None, "a guess has a lead"
    return DraftTokens(
        token_ids=np.maximum(choices.token_ids, _WITHOUT_NUMBERS),
        margins=_within_certain(choices.leads),
    )


class GreedyDraftSampler:
    """The most likely token, whatever the request's temperature: the draft is a function of the tokens before."""

    draws = False
    window = WINDOW

    def __init__(self, choice: SamplingKernels | None = None) -> None:
        self._choice = TorchSamplingKernels() if choice is None else choice

    def start(self, start: SequenceStart) -> None:
        pass

    def choose(self, logits: Tensor, _rows: DraftRows) -> DraftTokens:
        token_ids, margins = _first(self._choice, logits)
        return DraftTokens(token_ids=np.maximum(token_ids, _WITHOUT_NUMBERS), margins=margins)

    def requests(self, slots: Ints, positions: Ints) -> SamplingMetadata:
        count = len(slots)
        return SamplingMetadata(
            temperature=np.zeros(count, dtype=np.float32),
            min_p=np.zeros(count),
            top_k=np.zeros(count, dtype=np.int64),
            top_p=np.ones(count),
            seeds=np.zeros(count, dtype=np.uint64),
            positions=positions,
        )


class SampleAndMatchDraftSampler:
    """The likeliest guess at the token that the target will draw, knowing the number it will draw it with.

    The target lays its tokens along [0, 1], each as long as it is likely, and takes the one in which the number of
    this request and position falls. The draft model's tokens lie nearly there, so the guess is the one with most
    mass within `window` of the number, after the request's temperature and truncation. With no window it is what
    the request would get were the draft model the target; with one of 1 it is the most likely token.

    A draft is still a function of the tokens before it, the request's seed and the position, which is all that
    the target's choice looks at: so it is a point mass, any cut of it is exact, and no token of an answer depends
    on it. Source of the idea: drafter-invariant speculative decoding, arXiv 2408.07978.

    The confidence is the lead of the drawn token. Where the temperature is 0 it is the most likely one.
    """

    draws = False

    def __init__(self, num_slots: int, *, window: float = WINDOW, choice: SamplingKernels | None = None) -> None:
        self.window = window
        self._choice = TorchSamplingKernels() if choice is None else choice
        self._temperature = np.zeros(num_slots, dtype=np.float32)
        self._min_p = np.zeros(num_slots, dtype=np.float64)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._top_p = np.ones(num_slots, dtype=np.float64)
        self._seed = np.zeros(num_slots, dtype=np.uint64)

    def start(self, start: SequenceStart) -> None:
        slot, sampling = start.slot, start.sampling
        self._temperature[slot] = 0.0 if sampling.greedy else max(sampling.temperature, _COLDEST)
        self._min_p[slot], self._top_k[slot], self._top_p[slot] = sampling.min_p, sampling.top_k, sampling.top_p
        self._seed[slot] = start.seed

    def choose(self, logits: Tensor, rows: DraftRows) -> DraftTokens:
        token_ids, margins = _first(self._choice, logits)
        at = np.flatnonzero((self._temperature[rows.slots] > 0) & (token_ids != NO_TOKEN))
        if len(at):
            slots = rows.slots[at]
            noise = uniforms(self._seed[slots], rows.positions[at], Purpose.TOKEN, generate=self._choice.philox)
            token_ids[at], leads = self._choice.nearest(
                logits, at, token_ids[at], self._shaping(slots), noise, self.window
            )
            margins[at] = _within_certain(leads)
        return DraftTokens(token_ids=np.maximum(token_ids, _WITHOUT_NUMBERS), margins=margins)

    def requests(self, slots: Ints, positions: Ints) -> SamplingMetadata:
        shaping = self._shaping(slots)
        return SamplingMetadata(
            temperature=shaping.temperature,
            min_p=shaping.min_p,
            top_k=shaping.top_k,
            top_p=shaping.top_p,
            seeds=self._seed[slots],
            positions=positions,
        )

    def _shaping(self, slots: Ints) -> TruncationParams:
        return TruncationParams(
            temperature=self._temperature[slots],
            min_p=self._min_p[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
        )


class ProbabilisticDraftSampler:
    """A token drawn from softmax(logits / the request's temperature); the most likely one where that is 0.

    The noise is a function of (request seed, position, draft), of numbers that no verdict uses.
    """

    draws = True

    def __init__(self, num_slots: int, *, choice: SamplingKernels | None = None) -> None:
        self._choice = TorchSamplingKernels() if choice is None else choice
        self._temperature = np.zeros(num_slots, dtype=np.float32)
        self._seed = np.zeros(num_slots, dtype=np.uint64)

    def start(self, start: SequenceStart) -> None:
        self._temperature[start.slot] = start.sampling.temperature
        self._seed[start.slot] = start.seed

    def choose(self, logits: Tensor, rows: DraftRows) -> DraftTokens:
        token_ids, margins = _first(self._choice, logits)
        masses = logits.clone()
        drawn = (self._temperature[rows.slots] > 0) & (token_ids != NO_TOKEN)
        if len(at := np.flatnonzero(drawn)):
            token_ids[at] = self._draw(masses, at, token_ids[at], rows)
        np.maximum(token_ids, _WITHOUT_NUMBERS, out=token_ids)
        if len(at := np.flatnonzero(~drawn)):
            masses[at] = 0.0
            masses[at, token_ids[at]] = 1.0
        probs = masses.double()
        return DraftTokens(token_ids=token_ids, margins=margins, probs=probs.div_(probs.sum(-1, keepdim=True)))

    def _draw(self, logits: Tensor, at: Ints, best: Ints, rows: DraftRows) -> Ints:
        """Tokens of the rows `at`, whose masses take the place of the logits."""
        slots, off = rows.slots[at], np.zeros(len(at))
        shaping = TruncationParams(
            temperature=self._temperature[slots], min_p=off, top_k=off.astype(np.int64), top_p=np.ones(len(at))
        )
        noise = uniforms(
            self._seed[slots], rows.positions[at], Purpose.DRAFT, rows.draft_starts[at], self._choice.philox
        )
        self._choice.masses(logits, at, best, shaping)
        masses = logits if len(at) == len(logits) else logits[at]
        token_ids: Ints = draw(masses, torch.from_numpy(noise).to(logits.device)).numpy(force=True)
        return token_ids


class WithTopIds:
    """Chooses as another choice does, and names the num_top likeliest tokens (fewer in a smaller vocabulary).

    Only where that is asked for: to find them takes longer than to choose one.
    """

    def __init__(self, choice: DraftSampler, num_top: int) -> None:
        self._choice = choice
        self._num_top = num_top

    @property
    def draws(self) -> bool:
        return self._choice.draws

    def start(self, start: SequenceStart) -> None:
        self._choice.start(start)

    def choose(self, logits: Tensor, rows: DraftRows) -> DraftTokens:
        if not rows.wants_top_ids:
            return self._choice.choose(logits, rows)
        top_ids = leading(logits, self._num_top).token_ids
        return replace(self._choice.choose(logits, rows), top_ids=top_ids)


def _first(choice: SamplingKernels, logits: Tensor) -> tuple[Ints, Reals]:
    """The most likely tokens, NO_TOKEN where there is none, and their margins."""
    token_ids, leads = choice.best_and_lead(logits)
    return token_ids, np.minimum(leads, _CERTAIN)


def _within_certain(leads: Reals) -> Reals:
    found: Reals = np.minimum(np.maximum(leads, -_CERTAIN), _CERTAIN)
    return found
