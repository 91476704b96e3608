"""The policy `survival`: draft as much as allowed, then verify the drafted tokens most likely to survive.

What vLLM calls adaptive verification (pull requests 47808 and 52228): all drafted tokens of a batch are ranked by
the probability that they and all before them are accepted, and cut where tokens a second peak.
"""

from faser.engine.contract.plan import StopRule
from faser.engine.control.speculation.policies.objective import Objective, best_prefixes
from faser.engine.control.speculation.policies.policy import Candidates, Ints
from faser.engine.control.timing.cost_model import CostModel


class Survival:
    """See Policy. Counts the time of drafting, spent though it is, among the step's; tokens weigh the same."""

    name = "survival"

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs

    def lengths(self, candidates: Candidates) -> Ints:
        return candidates.limit.copy()

    def stop_rule(self, candidates: Candidates, lengths: Ints) -> StopRule | None:  # noqa: ARG002
        return None

    def keep(self, candidates: Candidates, lengths: Ints) -> Ints:
        sunk_s = self._costs.draft_s(lengths, candidates.lag)
        objective = Objective(self._costs, candidates)
        return best_prefixes(objective, candidates.survival[:, 1:], lengths, sunk_s).lengths
