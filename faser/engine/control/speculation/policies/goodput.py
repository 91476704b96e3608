"""The policy `goodput`: one acceptance rate and one draft length for all (SmartSpec, arXiv:2406.14066).

Goodput of length k is tokens per second of the whole step, with (1 - α^(k+1)) / (1 - α) tokens per sequence
(section 3). Once drafting is off it must gain a tenth to be switched on again, so that noise does not do it.
"""

import numpy as np

from faser.engine.control.speculation.policies.objective import Objective
from faser.engine.control.speculation.policies.policy import Candidates, Ints, Policy
from faser.engine.control.step_cost import CostModel

_SWITCH_ON = 1.10


class Goodput(Policy):
    name = "goodput"

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._on = True

    def lengths(self, candidates: Candidates) -> Ints:
        deepest = int(candidates.limit.max(initial=0))
        if deepest == 0:
            return np.zeros_like(candidates.limit)
        objective = Objective(self._costs, candidates)
        rates = np.array(
            [objective.rate_without_drafts, *(self._rate(candidates, objective, k) for k in range(1, deepest + 1))]
        )
        needed = rates[0] if self._on else rates[0] * _SWITCH_ON
        best = int(np.argmax(rates))
        self._on = best > 0 and float(rates[best]) > needed
        return np.minimum(candidates.limit, best if self._on else 0)

    def _rate(self, candidates: Candidates, objective: Objective, gamma: int) -> float:
        lengths = np.minimum(candidates.limit, gamma)
        alpha = float(candidates.survival[:, 1].mean())
        worth = objective.worth + float((alpha ** np.arange(1, gamma + 1))[: int(lengths.max())].sum()) * len(
            lengths
        )
        seconds = objective.verify_s(lengths.sum(keepdims=True))[0] + self._costs.draft_s(
            lengths, candidates.missing_kv
        )
        return worth / float(seconds)
