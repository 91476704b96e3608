"""OutcomeLearner: what drafts cost and what became of them, passed on to the estimates and the counters.

Owns nothing that lasts. Teaches Acceptance which draft tokens were accepted and CostModel what drafting took, and
writes down in SpeculationState which tokens the draft KV cache holds.
"""

from collections.abc import Sequence as Many
from dataclasses import replace

import numpy as np

from faser.engine.contract.plan import Drafts, StepPlan, StepResult
from faser.engine.contract.step_times import Role
from faser.engine.control.sequences.sequence import Sequence, Status
from faser.engine.control.speculation.acceptance.draft_arrays import FIRST_TEXT, DraftArrays
from faser.engine.control.speculation.acceptance.estimator import Acceptance, Outcomes
from faser.engine.control.speculation.cut_drafts import cut_drafts
from faser.engine.control.speculation.overlap.control import OverlapControl
from faser.engine.control.speculation.policies.policy import Candidates, Ints
from faser.engine.control.speculation.state import SpeculationState
from faser.engine.control.speculation.statistics import SpeculationStatistics
from faser.engine.control.timing.cost_model import CostModel

_BONUS = np.array(1)  # token of a step after the accepted ones


class OutcomeLearner:
    """See the module."""

    def __init__(
        self, costs: CostModel, acceptance: Acceptance, state: SpeculationState, statistics: SpeculationStatistics
    ) -> None:
        self._costs = costs
        self._acceptance = acceptance
        self._state = state
        self._statistics = statistics

    def learn_drafting(self, drafts: Drafts, candidates: Candidates, methods: Ints, lengths: Ints) -> None:
        """The drafts of the candidates have come: methods, lengths: [S]. Afterwards no KV is missing of them."""
        self._statistics.count_catchup(drafts.catchup_tokens)
        by_model = methods < FIRST_TEXT
        modelled = lengths * by_model
        longest = max(modelled.tolist()) if drafts.passes else 0
        if longest:
            # A pass whose tokens were all dropped is not in the lengths.
            predicted_s = self._costs.draft_s(modelled, candidates.missing_kv) * drafts.passes / longest
            self._costs.observe(Role.PASS, predicted_s, drafts.run_s)
        else:
            predicted_s = self._costs.text_s(len(lengths))
            if not drafts.passes and Role.TEXT in self._costs.tables:
                self._costs.observe(Role.TEXT, predicted_s, drafts.run_s)
        self._statistics.time_drafting(predicted_s, drafts.run_s)
        if np.count_nonzero(candidates.missing_kv):
            self._state.extend_draft_kv(candidates.slots, candidates.missing_kv * by_model)

    def learn_verified(
        self, drafted: DraftArrays, plan: StepPlan, result: StepResult, sequences: Many[Sequence]
    ) -> None:
        """A step has verified drafts. A sequence that was preempted meanwhile or failed teaches nothing.

        sequences: of plan.rows, in their order.
        """
        running = Status.RUNNING
        num_brought = {
            outcome.slot: len(outcome.token_ids)
            for outcome, sequence in zip(result.sequences, sequences, strict=True)
            if outcome.token_ids and sequence.status is running
        }
        brought = np.array([num_brought.pop(slot, 0) for slot in drafted.slots.tolist()], dtype=np.int64)
        if num_brought:
            self._statistics.count_undrafted(np.array([*num_brought], dtype=np.int64))
        if np.count_nonzero(brought) < len(brought):
            there = brought.nonzero()[0]
            drafted, brought = drafted.among(there), brought[there]
        if not len(brought):
            return
        accepted = brought - _BONUS
        if not drafted.border:
            self._state.extend_draft_kv(drafted.slots, (drafted.methods < FIRST_TEXT) * brought)
        cut = cut_drafts(drafted.slots, plan, result)
        if cut is not None:
            drafted = replace(drafted, kept=drafted.kept - cut.num_cut)
            self._statistics.count_pruned_rows(drafted.methods, cut.num_cut)
        outcomes = drafted.outcomes(accepted)
        self._statistics.count_drafts(outcomes, drafted.survival)
        if drafted.border:
            outcomes = drafted.outcomes(accepted, border=1)
        self._teach(outcomes if cut is None else cut.with_first_cut(outcomes))

    def learn_undrafted(self, plan: StepPlan, sequences: Many[Sequence]) -> None:
        """A step without drafts is done. sequences: as in learn_verified."""
        running = Status.RUNNING
        slots = [
            rows.slot
            for rows, sequence in zip(plan.rows, sequences, strict=True)
            if rows.samples and sequence.status is running
        ]
        self._statistics.count_undrafted(np.array(slots, dtype=np.int64))

    def learn_overlapped(
        self, plan: StepPlan, result: StepResult, drafts: Drafts, overlap: OverlapControl, *, verify_s: float
    ) -> None:
        """The step and the drafts made during it are done. verify_s: what the step should have taken alone.

        Afterwards a draft model's cache holds every token up to the last one that the step brought.
        """
        self._statistics.count_catchup(drafts.catchup_tokens)
        learned = overlap.learn(result, drafts, verify_s=verify_s)
        self._statistics.time_lanes(
            (learned.verify_s, result.run_s), (learned.draft_s, drafts.run_s), learned.overlap_s
        )
        self._statistics.count_dropped(learned.slots, learned.methods, learned.dropped)
        if len(learned.outcomes.slots):
            self._teach(learned.outcomes)
        by_model = learned.slots[learned.methods < FIRST_TEXT]
        if len(by_model):
            ends = {
                rows.slot: rows.start + len(rows.token_ids) - rows.num_drafts + len(outcome.token_ids)
                for rows, outcome in zip(plan.rows, result.sequences, strict=True)
            }
            self._state.set_draft_kv(by_model, [ends[slot] for slot in by_model.tolist()])

    def _teach(self, outcomes: Outcomes) -> None:
        """While a cached decision serves further steps, outcomes wait for its end."""
        self._acceptance.hold(outcomes)
        if self._state.decision_expired:
            self._acceptance.learn_held()
