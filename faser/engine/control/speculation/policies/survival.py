"""The policy `survival`: draft as much as allowed, then verify the draft tokens most likely to survive.

vLLM calls it adaptive verification (pull requests 47808 and 52228): all draft tokens of a batch are ranked by the
probability that they and all tokens before them are accepted, and the ranking is cut where tokens per second peak.
"""

from faser.engine.control.speculation.policies.objective import Objective, best_prefixes
from faser.engine.control.speculation.policies.policy import Candidates, Ints, Policy
from faser.engine.control.step_cost import CostModel


class Survival(Policy):
    """The time of drafting counts in the step although it is spent already; all tokens weigh the same."""

    name = "survival"

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs

    def lengths(self, candidates: Candidates) -> Ints:
        return candidates.limit.copy()

    def keep(self, candidates: Candidates, lengths: Ints) -> Ints:
        sunk_s = self._costs.draft_s(lengths, candidates.missing_kv)
        objective = Objective(self._costs, candidates)
        return best_prefixes(objective, candidates.survival[:, 1:], lengths, sunk_s).lengths
