"""Knowledge: an Acceptance that knows what becomes of every draft, for comparison with one that has to learn it.

The simulated executor says how many of the tokens that a slot drafts next are those of its output. Nothing that
serves requests knows that: what an engine does with this knowledge is the most that better estimates could bring.
"""

import numpy as np

from benchmarks.simulator.executor import WRONG, SimulatedExecutor
from faser.engine.contract.drafts import DraftTable
from faser.engine.control.speculation.acceptance import Acceptance
from faser.engine.control.speculation.draft_lengths import (
    Objective,
    best_lengths,
    best_prefixes,
    seconds_with_drafts,
)
from faser.engine.control.speculation.needs import needed_tokens
from faser.engine.control.speculation.policy import Candidates, Policy
from faser.engine.control.step_cost import CostModel
from faser.types.arrays import Floats, Ints


class Knowledge(Acceptance):
    """executor: whose drafts it knows; to be set before the first step."""

    executor: SimulatedExecutor

    def survival(self, slots: Ints, *, by_model: bool) -> Floats:  # noqa: ARG002
        right = np.array([self.executor.num_right(slot) for slot in slots.tolist()], dtype=np.int64)
        return (np.arange(self.cap + 1) <= right[:, None]).astype(np.float64)

    def drafted_survival(self, drafts: DraftTable) -> Floats:
        within = np.arange(self.cap) < drafts.lengths[:, None]
        right = np.logical_and.accumulate((drafts.token_ids != WRONG) & within, axis=1)
        return np.concatenate((np.ones((len(right), 1)), right), axis=1)

    def choose(
        self, drafts: DraftTable, count: int, requested: Ints | None, row_price: float = 0.0
    ) -> tuple[Ints, DraftTable, Floats]:
        taken, table, _ = super().choose(drafts, count, requested, row_price)
        return taken, table, self.drafted_survival(table)

    def policy(self, costs: CostModel) -> Policy:
        return _Knowing(costs)


class _Knowing(Policy):
    """The two phases of `faser`. It drafts no token that would be rejected, and needs neither probes nor stops."""

    name = "oracle"

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs

    def lengths(self, candidates: Candidates) -> Ints:
        right = np.add.reduce(candidates.survival[:, 1:], axis=1).astype(np.int64)
        known = candidates.drafted(np.minimum(candidates.limit, right), candidates.survival)
        if not self._costs.has_passes:
            return known.limit
        objective = Objective(self._costs, known)
        lengths = best_lengths(known, objective, self._costs).lengths
        needed = needed_tokens(
            known,
            known.limit,
            lambda count, urgency: (
                objective.prompts_s + seconds_with_drafts(known, urgency.lengths(count), objective, self._costs)
            ),
        )
        return lengths if needed is None else np.maximum(lengths, needed)

    def keep(self, candidates: Candidates, lengths: Ints) -> Ints:
        objective = Objective(self._costs, candidates)
        needed = needed_tokens(candidates, lengths, lambda count, _: objective.verified_s(count))
        return best_prefixes(objective, candidates.survival, lengths, least=needed).lengths
