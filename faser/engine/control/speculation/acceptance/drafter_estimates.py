"""How often to expect a drafter to be right: open drafts, and the acceptance estimates that settled drafts leave.

An open draft says how a text continues; the tokens that come settle it, a few at a time. The estimates add up
accepted and judged tokens by key and let old ones fade. Knows no drafter.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace

PRIOR_TOKENS = 4.0  # a prior weighs as much as this many judged tokens
KEPT_PER_STEP = 0.96  # of the weight of old tokens: half is gone after 17 steps
MOST_TOKENS = 32.0  # largest weight of a key: a good draft adds many tokens a step, a bad one only the refused one


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenDraft:
    """The claim that token_ids follow if the sequence continues with `unverified`. keys: the estimates it feeds.

    drawn: the tokens were drawn from probabilities, so only verification says whether they are accepted.
    """

    keys: tuple[Hashable, ...]
    unverified: tuple[int, ...]
    token_ids: tuple[int, ...]
    drawn: bool = False

    def cut(self, num_tokens: int) -> "OpenDraft":
        """The same draft, at most num_tokens long."""
        return replace(self, token_ids=self.token_ids[:num_tokens])

    def meet(self, token_ids: tuple[int, ...]) -> tuple[int, int, "OpenDraft | None"]:
        """Compare with the tokens that a step brought: accepted drafts, then one token of the target.

        Returns how many of its tokens are accepted, how many are judged, and the part that is still open, if any.
        A point mass is accepted where it equals the target's token, verified or not. A drawn token is accepted
        only as far as verification reached: where verification ended, an equal token was not judged.
        """
        if _agreement(self.unverified, token_ids) < min(len(self.unverified), len(token_ids)):
            return 0, 0, None
        following = token_ids[len(self.unverified) :]
        accepted = len(token_ids) - 1 if self.drawn else _agreement(self.token_ids, following)
        reached = min(len(self.token_ids), len(following))
        refused = accepted < reached and self.token_ids[accepted] != following[accepted]
        if refused or self.drawn or accepted == len(self.token_ids):
            return accepted, accepted + refused, None
        unverified = self.unverified[len(token_ids) :]
        return accepted, accepted, replace(self, unverified=unverified, token_ids=self.token_ids[accepted:])


def _agreement(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many leading tokens are the same."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


class AcceptanceEstimates:
    """Accepted and judged drafted tokens by key; older ones weigh less, and a key weighs at most MOST_TOKENS."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, _Counts] = {}
        self._now = 0

    def fade(self) -> None:
        """A step passes: everything known so far weighs less."""
        self._now += 1

    def add(self, keys: tuple[Hashable, ...], accepted: int, judged: int) -> None:
        """Count the same tokens for every key."""
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
        """The acceptance rate of the last key; each key's rate is the prior of the next one."""
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
    """Weights as of `step`."""

    step: int
    accepted: float = 0.0
    judged: float = 0.0
