"""TargetRoom: how many sequences fit while a target per token is kept, and how many of them may be without one.

Sequences with a target per token are paced, the others unpaced. The engine starts unpaced ones by it
(control/targets.py), and the front-end predicts by it what a newcomer will find (client/admission.py); so both
have one rule. An eighth of the sequences that fit, and one at least, may always be unpaced: none of them waits
for ever. As many slots are left free for paced newcomers; unpaced ones may use all other empty places. Both have
the same order of first tokens, too.
"""

import numpy as np

from faser.engine.contract.latency_model import Pace
from faser.types.request import Request

PATIENCE_S = 20.0
SEEN_S = 60.0  # a target is kept for so long after the last request that had it
_SHARE = 8  # of which one may always be unpaced, and one slot is left free
_EXPECTED_SHARE = 0.9  # of the target that tokens are planned to take at most: a pace is a mean


def due_s(request: Request) -> float:
    """When its first token is due, with patience in place of a target."""
    return request.arrival_s + PATIENCE_S if request.due_s is None else request.due_s


class TargetRoom:
    """Times are seconds of one clock, which the caller reads."""

    def __init__(self) -> None:
        self._seen_s: dict[float, float] = {}  # by target, in seconds per token: when it was asked for last
        self._most = self._num_slots = 0

    def see(self, tpot_ms: float | None, now_s: float) -> None:
        """A request with this target, or without one, has come."""
        if tpot_ms is not None:
            self._seen_s[tpot_ms / 1000] = now_s

    def tightest_s(self, now_s: float, newcomer_ms: float | None = None) -> float | None:
        """Seconds per token that are planned for; None: no request has had a target lately.

        newcomer_ms: the target of one that may come.
        """
        if self._seen_s and min(self._seen_s.values()) <= now_s - SEEN_S:
            self._seen_s = {target: at for target, at in self._seen_s.items() if at > now_s - SEEN_S}
        targets = [*self._seen_s, *([] if newcomer_ms is None else [newcomer_ms / 1000])]
        return _EXPECTED_SHARE * min(targets) if targets else None

    def fit(self, pace: Pace, token_s: float) -> None:
        """From now on as many sequences fit as take at most token_s per token at this pace."""
        within = np.flatnonzero(pace.token_s(np.arange(1.0, pace.num_slots + 1)) <= token_s)
        self._most = int(within[-1]) + 1 if len(within) else 0
        self._num_slots = pace.num_slots

    def unpaced(self, num_paced: int) -> int:
        """Return how many sequences may be unpaced next to this number of paced ones."""
        share = max(self._most // _SHARE, 1)
        return max(min(self._most, self._num_slots - share) - num_paced, share)
