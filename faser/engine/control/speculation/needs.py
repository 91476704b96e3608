"""The first of two phases in which a step's draft tokens are chosen: those that targets per token need.

A sequence keeps its target if it has, at any time, a token for every target's seconds since its first one. What it
lacks is caught up over the next HORIZON steps, since a target is one for the mean of an answer; so at the end of a
step of T seconds a sequence wants

    needed = lacking / HORIZON + T / target        tokens of this step, of which one comes without drafts

and gets the fewest draft tokens that are expected to bring them, or all that are likely enough. T depends on
all of these lengths in turn: they are the least ones for which this holds together. A token is needed from some T
on; so, with tokens in the order of these times, the least n is sought for which no token behind the first n is
needed in the step that verifies these n. The second phase adds what throughput wants, to all sequences alike
(draft_lengths.py).

Source: AdaServe, arXiv:2501.12162, section 4: A(r), the tokens that a request needs to attain its SLO, come before
those that raise throughput. There HORIZON is 1, T is fixed, and trees are chosen from.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from faser.engine.control.speculation.draft_lengths import upto
from faser.engine.control.speculation.policy import Candidates
from faser.types.arrays import Ints

# Reasoned, not fitted: how throughput changes with each halved or doubled is in results/control-constants.json.
HORIZON = 8  # steps within which a target must be met again
FLOOR = 0.05  # survival of a token that a target may need


class Urgency(NamedTuple):
    """Draft tokens in the order in which targets need them as a step gets longer.

    from_s: how long a step may take without needing the token, ascending. places: of its sequence among the
    candidates; their number is num_sequences.
    """

    from_s: list[float]
    places: Ints
    num_sequences: int

    def lengths(self, count: int) -> Ints:
        """Return the draft lengths [S] of the first `count` tokens."""
        lengths: Ints = np.bincount(self.places[:count], minlength=self.num_sequences)
        return lengths


def needed_tokens(candidates: Candidates, limit: Ints, seconds: Callable[[int, Urgency], float]) -> Ints | None:
    """Return the draft tokens [S] that targets need, at most limit; None, as nearly always: none at all.

    seconds: of the step with this number of the most urgent tokens; more of them never make it shorter.
    """
    lacking, per_s = candidates.sequences.lacking, candidates.sequences.wanted_per_s
    has_target = per_s.nonzero()[0]
    if not len(has_target):
        return None
    share, per_s = lacking.take(has_target) / HORIZON, per_s.take(has_target)
    urgency = Urgency([], has_target[:0], len(limit))
    least_s = seconds(0, urgency)
    if not np.count_nonzero(share + per_s * least_s > 1.0):
        return None
    survival = candidates.survival.take(has_target, axis=0)
    num_depths = survival.shape[1] - 1
    from_s = (np.add.accumulate(survival[:, :-1], axis=1) - share[:, None]) / per_s[:, None]  # [S, K]
    allowed = upto(num_depths).take(limit.take(has_target), axis=0) & (survival[:, 1:] >= FLOOR)
    tokens = allowed.ravel().nonzero()[0]
    from_s = from_s.take(tokens)
    order = from_s.argsort(kind="stable")
    urgency = Urgency(from_s.take(order).tolist(), has_target.take(tokens.take(order) // num_depths), len(limit))
    count, found = 0, bisect_left(urgency.from_s, least_s)
    while found > count:
        count, found = found, bisect_left(urgency.from_s, seconds(found, urgency))
    return urgency.lengths(count) if count else None
