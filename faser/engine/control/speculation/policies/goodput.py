"""The policy `goodput`: one acceptance rate and one draft length for all (SmartSpec, arXiv:2406.14066).

Goodput of length k is tokens a second of the whole step, (1 - α^(k+1)) / (1 - α) tokens a sequence (section 3); a
margin of a tenth keeps noise from switching it on.
"""

import numpy as np

from faser.engine.contract.plan import StopRule
from faser.engine.control.speculation.policies.objective import Objective
from faser.engine.control.speculation.policies.policy import Candidates, Ints
from faser.engine.control.timing.cost_model import CostModel

_SWITCH_ON = 1.10


class Goodput:
    """See Policy."""

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
            [objective.plain_rate, *(self._rate(candidates, objective, k) for k in range(1, deepest + 1))]
        )
        needed = rates[0] if self._on else rates[0] * _SWITCH_ON
        best = int(np.argmax(rates))
        self._on = best > 0 and float(rates[best]) > needed
        return np.minimum(candidates.limit, best if self._on else 0)

    def stop_rule(self, candidates: Candidates, lengths: Ints) -> StopRule | None:  # noqa: ARG002
        return None

    def keep(self, candidates: Candidates, lengths: Ints) -> Ints:  # noqa: ARG002
        return lengths

    def _rate(self, candidates: Candidates, objective: Objective, gamma: int) -> float:
        lengths = np.minimum(candidates.limit, gamma)
        alpha = float(candidates.survival[:, 1].mean())
        worth = objective.worth + float((alpha ** np.arange(1, gamma + 1))[: int(lengths.max())].sum()) * len(
            lengths
        )
        seconds = objective.verify_s(lengths.sum(keepdims=True))[0] + self._costs.draft_s(lengths, candidates.lag)
        return worth / float(seconds)
