"""Drafts at every position of an answer, and what they are worth at a price for a row. Pure functions.

Tokens follow from the text before them alone, so an answer is the same whatever is drafted, and a draft at a
position is right as far as it equals the answer. A step that verifies k draft tokens of which a are right goes on
a + 1 positions further.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.text_replay.drafters import Draft, Replayed
from benchmarks.text_replay.recording import Answer

_DEEPEST = 4  # depths from this one on share their rates
_PRIOR = 0.3, 2.0  # acceptance before any token of this confidence was judged, and how many tokens that is worth


@dataclass(frozen=True, slots=True)
class Offer:
    """One draft at one position. right: leading tokens that equal the answer."""

    confidences: tuple[Hashable, ...]
    right: int


Offers = list[list[Offer]]  # by position: of every draft that is offered there


def offers(drafter: Replayed, name: str, answer: Answer) -> Offers:
    """What the drafter offers before every token of the answer but the first, which the prompt's step brings."""
    drafter.begin(answer)
    found: Offers = []
    for at, token in enumerate(answer.tokens):
        if at:
            found.append([_judged(draft, name, answer.tokens[at:]) for draft in drafter.drafts() if draft])
        drafter.learn(token, answer.top[at], answer.top_logprobs[at])
    drafter.end()
    return found


def _judged(draft: Draft, name: str, tokens: Sequence[int]) -> Offer:
    right = 0
    for (drafted, _), token in zip(draft, tokens, strict=False):
        if drafted != token:
            break
        right += 1
    return Offer(
        confidences=tuple((name, value, min(depth, _DEEPEST)) for depth, (_, value) in enumerate(draft)),
        right=right,
    )


class Rates:
    """How often tokens of each confidence were right, of those that were reached."""

    def __init__(self) -> None:
        chance, weight = _PRIOR
        self._counts: dict[Hashable, list[float]] = defaultdict(lambda: [chance * weight, weight])

    def learn(self, found: Offers) -> None:
        for offered in found:
            for offer in offered:
                for depth, confidence in enumerate(offer.confidences[: offer.right + 1]):
                    counts = self._counts[confidence]
                    counts[0] += depth < offer.right
                    counts[1] += 1

    def survival(self, offer: Offer) -> list[float]:
        chance, found = 1.0, []
        for confidence in offer.confidences:
            right, judged = self._counts[confidence]
            chance *= right / judged
            found.append(chance)
        return found


@dataclass(slots=True)
class Tally:
    """Steps without the one that reads the prompt. tokens: that they brought; rows: drafted and verified."""

    steps: int = 0
    tokens: int = 0
    rows: int = 0
    drafting: int = 0

    def add(self, other: "Tally") -> None:
        self.steps += other.steps
        self.tokens += other.tokens
        self.rows += other.rows
        self.drafting += other.drafting


def played(found: Sequence[Offers], rates: Rates, price: float) -> Tally:
    """One answer. found: the offers of each drafter; the best is taken, as far as worth the price of a row."""
    tally, at, length = Tally(), 0, len(found[0])
    while at < length:
        best, rows, right = 0.0, 0, 0
        for by_drafter in found:
            for offer in by_drafter[at]:
                survival = rates.survival(offer)
                kept = sum(chance > price for chance in survival)
                value = sum(survival[:kept]) - kept * price
                if value > best:
                    best, rows, right = value, kept, min(kept, offer.right)
        brought = min(right + 1, length - at)
        tally.steps += 1
        tally.tokens += brought
        tally.rows += rows
        tally.drafting += rows > 0
        at += brought
    return tally


def gain(tally: Tally, requests: int, seconds: Mapping[int, float]) -> float:
    """Tokens per second over those without drafts, where all requests at once draft so many rows in the mean."""
    rows = requests * (1 + tally.rows / tally.steps)
    return tally.tokens / tally.steps * _between(seconds, requests) / _between(seconds, rows)


def _between(seconds: Mapping[int, float], rows: float) -> float:
    """Seconds of a step, linear between two row counts and beyond the last."""
    known = sorted(seconds)
    above = next((each for each in known[1:] if each >= rows), known[-1])
    below = known[known.index(above) - 1]
    return seconds[below] + (rows - below) / (above - below) * (seconds[above] - seconds[below])
