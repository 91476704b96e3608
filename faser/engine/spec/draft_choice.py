"""How a draft model's logits become a drafted token: the most likely one, or one drawn at random.

All report a confidence in nats, the margin between the two largest logits or that of the drawn token over the
best other one. The logits are raw: a request's penalties and masks are the target's business, and a draft that
ignores them costs acceptance, never exactness.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.noise import Purpose, uniforms
from faser.engine.plan import SequenceStart
from faser.engine.ranking import first_and_lead
from faser.engine.sampling import Truncation, draw, final_masses, scale, token_masses

_COLDEST = float(np.finfo(np.float32).tiny)
_WINDOW = 0.05  # about how far the draft model's tokens lie from the target's (benchmarks/draft_agreement.py)
_CERTAIN = 100.0  # nats; larger margins, and infinite ones, say no more


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A token per row. token_ids: [R] int64. margins: [R] float64, -100 … 100 nats; 0 where logits are no numbers.

    probs: [R, V] float64, exactly what each token was drawn from; None where tokens are point masses.
    """

    token_ids: NDArray[np.int64]
    margins: NDArray[np.float64]
    probs: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRows:
    """Whose tokens are chosen, [R] each. positions: of the tokens; draft_starts: of their drafts' first ones."""

    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    draft_starts: NDArray[np.int64]


class DraftChoice(Protocol):
    """Chooses drafted tokens. Remembers of a slot only what its request asked for."""

    def start(self, start: SequenceStart) -> None:
        """A sequence takes over a slot."""
        ...

    def choose(self, logits: Tensor, rows: ChoiceRows) -> Chosen:
        """A token for every row. logits: [R, V] float32, not written to."""
        ...


class GreedyChoice:
    """The most likely token, whatever the request's temperature: the draft is a function of the tokens before."""

    def start(self, start: SequenceStart) -> None:
        pass

    def choose(self, logits: Tensor, _rows: ChoiceRows) -> Chosen:
        token_ids, margins = _read(logits)
        return Chosen(token_ids=token_ids, margins=margins)


class CoupledChoice:
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

    def __init__(self, num_slots: int, *, window: float = _WINDOW) -> None:
        self._window = window
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

    def choose(self, logits: Tensor, rows: ChoiceRows) -> Chosen:
        token_ids, margins = _read(logits)
        drawn = self._temperature[rows.slots] > 0
        if drawn.any():
            at = np.flatnonzero(drawn & logits.amax(-1).isfinite().cpu().numpy())
            if len(at):
                token_ids[at], margins[at] = self._draw(logits[at], rows.slots[at], rows.positions[at])
        return Chosen(token_ids=token_ids, margins=margins)

    def _draw(
        self, logits: Tensor, slots: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Tokens and their leads. logits: [R, V], overwritten."""

        def of(values: NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(values[slots]).to(logits.device)

        cut = Truncation(
            min_p=of(self._min_p), top_k=of(self._top_k).clamp_(max=logits.shape[-1]), top_p=of(self._top_p)
        )
        noise = torch.from_numpy(uniforms(self._seed[slots], positions, Purpose.TOKEN)).to(logits.device)
        scaled = scale(logits, of(self._temperature))
        token_ids = nearest(final_masses(scaled, cut), noise, self._window)
        own = scaled.gather(-1, token_ids[:, None])
        leads = own[:, 0] - scaled.scatter_(-1, token_ids[:, None], -torch.inf).amax(-1)
        return token_ids.cpu().numpy(), leads.double().clamp_(-_CERTAIN, _CERTAIN).cpu().numpy()


class SampledChoice:
    """A token drawn from softmax(logits / the request's temperature); the most likely one where that is 0, and
    where the logits are no numbers.

    The noise is a function of (request seed, position, draft), of numbers that no verdict uses.
    """

    def __init__(self, num_slots: int) -> None:
        self._temperature = np.zeros(num_slots, dtype=np.float32)
        self._seed = np.zeros(num_slots, dtype=np.uint64)

    def start(self, start: SequenceStart) -> None:
        self._temperature[start.slot] = start.sampling.temperature
        self._seed[start.slot] = start.seed

    def choose(self, logits: Tensor, rows: ChoiceRows) -> Chosen:
        token_ids, margins = _read(logits)
        probs = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
        drawn = (self._temperature[rows.slots] > 0) & logits.amax(-1).isfinite().cpu().numpy()
        at = np.flatnonzero(~drawn)
        probs[at, token_ids[at]] = 1.0
        at = np.flatnonzero(drawn)
        if len(at):
            slots = rows.slots[at]
            temperature = torch.from_numpy(self._temperature[slots]).to(logits.device)
            noise = uniforms(self._seed[slots], rows.positions[at], Purpose.DRAFT, rows.draft_starts[at])
            masses = token_masses(scale(logits[at], temperature))
            token_ids[at] = draw(masses, torch.from_numpy(noise).to(logits.device)).cpu().numpy()
            wide = masses.double()
            probs[at] = wide / wide.sum(-1, keepdim=True)
        return Chosen(token_ids=token_ids, margins=margins, probs=probs)


def nearest(masses: Tensor, noise: Tensor, window: float) -> Tensor:
    """[R] the token with most mass within window of the number; with a window of 0 the one it falls in.

    masses: [R, V] whole numbers, not normalised. noise: [R] float64 in [0, 1).
    """
    ends = masses.cumsum(-1, dtype=torch.float64)
    total = ends[:, -1]
    if window == 0:
        return draw(masses, noise)
    centre = (noise * total)[:, None]
    reach = (window * total)[:, None]
    starts = ends - masses
    inside = torch.minimum(ends, centre + reach).sub_(torch.maximum(starts, centre - reach))
    return inside.argmax(-1)


def _read(logits: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The most likely tokens and their margins, brought to the host in one copy. float64 holds every token id."""
    token_ids, leads = first_and_lead(logits)
    both = torch.stack((token_ids.double(), leads.double())).cpu().numpy()
    leads_nats = both[1]  # not above 0 where it is no number
    return both[0].astype(np.int64), np.where(leads_nats > 0, np.minimum(leads_nats, _CERTAIN), 0.0)
