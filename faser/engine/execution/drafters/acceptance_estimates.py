"""What a chooser knows of its drafters: claims still open, and evidence of those that tokens have settled.

A claim says how a text goes on; the tokens that come prove it right or wrong, a few at a time. Evidence adds up
verdicts by key, lets them fade, and says how often to expect the next one to be right. Knows no drafter.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace

from faser.engine.execution.drafters.drafter import Continuation

PRIOR_TOKENS = 4.0  # a prior weighs as much as so many judged tokens
KEPT_PER_STEP = 0.96  # of the weight of old evidence: half is gone after 17 steps
MOST_TOKENS = 32.0  # that evidence weighs: a good draft adds many tokens a step, a bad one only the one refused


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDraft:
    """That, if the sequence goes on with behind, token_ids come next. keys: whose reputation it concerns.

    drawn: the tokens were drawn from probabilities.
    """

    keys: tuple[Hashable, ...]
    unverified: tuple[int, ...]
    token_ids: tuple[int, ...]
    drawn: bool = False

    def cut(self, num_tokens: int) -> "OpenDraft":
        return replace(self, token_ids=self.token_ids[:num_tokens])

    def meet(self, came: Continuation) -> tuple[int, int, "OpenDraft | None"]:
        """How many of its tokens were right, how many could be judged, and what is still open; None: nothing.

        A point mass is accepted where it is the target's own token, whether or not it was verified. A drawn one
        only by its verdict: had it been right where the verdicts end, it was not judged.
        """
        if _agreement(self.unverified, came.token_ids) < min(len(self.unverified), len(came.token_ids)):
            return 0, 0, None
        token_ids = came.token_ids[len(self.unverified) :]
        accepted = came.num_accepted if self.drawn else _agreement(self.token_ids, token_ids)
        reached = min(len(self.token_ids), len(token_ids))
        refused = accepted < reached and self.token_ids[accepted] != token_ids[accepted]
        if refused or self.drawn or accepted == len(self.token_ids):
            return accepted, accepted + refused, None
        behind = self.unverified[len(came.token_ids) :]
        return accepted, accepted, replace(self, unverified=behind, token_ids=self.token_ids[accepted:])


def _agreement(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many leading tokens are the same."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


class AcceptanceEstimates:
    """Accepted and judged drafted tokens by key, the older the lighter, never more than MOST_TOKENS.

    A key unheard of has none.
    """

    def __init__(self) -> None:
        self._counts: dict[Hashable, _Counts] = {}
        self._now = 0

    def fade(self) -> None:
        """A step goes by."""
        self._now += 1

    def add(self, keys: tuple[Hashable, ...], accepted: int, judged: int) -> None:
        """The same tokens count for every key."""
        for key in keys:
            counts = self._counts.get(key)
            if counts is None:
                counts = self._counts[key] = _Counts(step=self._now)
            kept = KEPT_PER_STEP ** (self._now - counts.step)
            counts.accepted = counts.accepted * kept + accepted
            counts.judged = counts.judged * kept + judged
            counts.step = self._now
            if counts.judged > MOST_TOKENS:
                counts.accepted *= MOST_TOKENS / counts.judged
                counts.judged = MOST_TOKENS

    def rate(self, keys: tuple[Hashable, ...], prior: float) -> float:
        """Acceptance rate of the last key, for which the key before it is the prior, and so on."""
        for key in keys:
            counts = self._counts.get(key)
            if counts is not None:
                kept = KEPT_PER_STEP ** (self._now - counts.step)
                prior = (counts.accepted * kept + PRIOR_TOKENS * prior) / (counts.judged * kept + PRIOR_TOKENS)
        return prior

    def drop(self, key: Hashable) -> None:
        self._counts.pop(key, None)


@dataclass(slots=True)
class _Counts:
    """As of step."""

    step: int
    accepted: float = 0.0
    judged: float = 0.0
