"""The first of two phases in which a step's draft tokens are chosen: those that targets per token need.

A sequence keeps its target if it has, at any time, a token for every target's seconds since its first one. What it
lacks is caught up over the next HORIZON steps, since a target is one for the mean of an answer; so at the end of a
step of T seconds a sequence wants

    needed = lacking / HORIZON + T / target        tokens of this step, of which one comes without drafts

and gets the fewest draft tokens that are expected to bring them, or all that are likely enough. T depends on
all of these lengths in turn: they are the least ones for which this holds together. The second phase adds what
throughput wants, to all sequences alike (draft_lengths.py).

Source: AdaServe, arXiv:2501.12162, section 4: A(r), the tokens that a request needs to attain its SLO, come before
those that raise throughput. There HORIZON is 1, T is fixed, and trees are chosen from.
"""

from collections.abc import Callable

import numpy as np

from faser.engine.contract.drafts import Floats, Ints
from faser.engine.control.speculation.policy import Candidates

HORIZON = 8  # steps
FLOOR = 0.05  # survival of a token that a target may need


def needed_tokens(candidates: Candidates, limit: Ints, seconds: Callable[[Ints], float]) -> Ints | None:
    """[S] draft tokens that targets need, at most limit; None, as nearly always: none at all.

    seconds: of the step with drafts of these lengths; longer drafts never make it shorter.
    """
    lacking, per_s = candidates.sequences.lacking, candidates.sequences.wanted_per_s
    if not np.count_nonzero(per_s):
        return None
    lengths = np.zeros_like(limit)
    share = lacking / HORIZON
    needed = share + per_s * seconds(lengths)
    if not np.count_nonzero(needed > 1.0):
        return None
    limit = np.minimum(limit, np.add.reduce(candidates.survival[:, 1:] >= FLOOR, axis=1, dtype=np.int64))
    reached = np.add.accumulate(candidates.survival, axis=1)  # [S, K + 1] tokens to expect, by draft length
    while np.count_nonzero((found := np.minimum(_shortest(reached, needed), limit)) > lengths):
        lengths = np.maximum(lengths, found)
        needed = share + per_s * seconds(lengths)
    return lengths if np.count_nonzero(lengths) else None


def _shortest(reached: Floats, needed: Floats) -> Ints:
    """[S] the shortest drafts that are expected to bring the needed tokens; K + 1 where none does."""
    lengths: Ints = np.add.reduce(reached < needed[:, None], axis=1, dtype=np.int64)
    return lengths
