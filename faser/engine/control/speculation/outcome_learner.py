"""OutcomeLearner: what drafts cost and what became of them, passed on to the estimates and the counters.

Owns nothing that lasts. Teaches Acceptance which draft tokens were accepted and CostModel what drafting took, and
writes down in SpeculationState which tokens the draft KV cache holds.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from faser.engine.contract.plan import Drafts, StepPlan, StepResult
from faser.engine.contract.step_times import Role
from faser.engine.control.sequences.sequence import Sequence, Status
from faser.engine.control.speculation.acceptance.draft_arrays import (
    FIRST_TEXT,
    DraftArrays,
    ReadDrafts,
    came_tokens,
)
from faser.engine.control.speculation.acceptance.estimator import Acceptance, Verdicts
from faser.engine.control.speculation.overlap import OverlapControl
from faser.engine.control.speculation.policies.policy import Candidates, Ints
from faser.engine.control.speculation.state import SpeculationState
from faser.engine.control.speculation.statistics import SpeculationStatistics
from faser.engine.control.step_cost import CostModel

NONE_UNVERIFIED: Mapping[int, int] = MappingProxyType({})
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

    def learn_look_up(self, drafts: Drafts, count: int) -> None:
        """Drafts from text have been looked up for count sequences."""
        predicted_s = self._costs.text_s(count)
        if Role.TEXT in self._costs.tables:
            self._costs.observe(Role.TEXT, predicted_s, drafts.run_s)
        self._statistics.time_drafting(predicted_s, drafts.run_s)

    def learn_drafting(self, drafts: Drafts, candidates: Candidates, methods: Ints, lengths: Ints) -> None:
        """The drafts of the candidates have come: methods, lengths: [S]. Afterwards no KV is missing of them."""
        if not drafts.passes:
            self.learn_look_up(drafts, len(lengths))
            return
        self._statistics.count_catchup(drafts.catchup_tokens)
        by_model = methods < FIRST_TEXT
        modelled = lengths * by_model
        longest = max(modelled.tolist())
        predicted_s = self._costs.text_s(len(lengths))
        if longest:
            # A pass whose tokens were all dropped is not in the lengths.
            predicted_s = self._costs.draft_s(modelled, candidates.missing_kv) * drafts.passes / longest
            self._costs.observe(Role.PASS, predicted_s, drafts.run_s)
        self._statistics.time_drafting(predicted_s, drafts.run_s)
        if np.count_nonzero(candidates.missing_kv):
            self._state.extend_draft_kv(candidates.slots, candidates.missing_kv * by_model)

    def learn_verified(self, drafted: DraftArrays, result: StepResult, sequences: Many[Sequence]) -> int:
        """A step has verified drafts. A sequence that was preempted meanwhile or failed teaches nothing.

        sequences: of the step's rows, in their order. Returns how many draft tokens were accepted.
        """
        by_slot = _came_by_slot(result, sequences)
        came = [by_slot.pop(slot, ()) for slot in drafted.drafts.slots.tolist()]
        if by_slot:
            self._statistics.count_undrafted(np.array([*by_slot], dtype=np.int64))
        if () in came:
            drafted = drafted.among(np.array([i for i, each in enumerate(came) if each], dtype=np.int64))
            came = [each for each in came if each]
        if not came:
            return 0
        drafts = drafted.drafts
        brought = np.array([len(each) for each in came], dtype=np.int64)
        if not drafted.border:
            self._state.extend_draft_kv(drafts.slots, (drafts.methods < FIRST_TEXT) * brought)
        num_cut = _cut_by_step(drafts.slots, result)
        if num_cut is not None:
            drafted = replace(drafted, kept=drafted.kept - num_cut)
            self._statistics.count_pruned_rows(drafts.methods, num_cut)
        accepted = brought - _BONUS
        self._statistics.count_drafts(drafted, accepted)
        self._teach(drafted.verdicts(accepted, np.array([each[-1] for each in came], dtype=np.int64)))
        return int(np.add.reduce(accepted))

    def learn_not_chosen(
        self,
        drafts: ReadDrafts,
        result: StepResult,
        sequences: Many[Sequence],
        unverified: Mapping[int, int] = NONE_UNVERIFIED,
    ) -> None:
        """A step is done. drafts: from text, in whose place another draft was taken.

        sequences: as in learn_verified. One that was preempted meanwhile teaches nothing: its slot may be taken.
        unverified: by slot, tokens that the step verified and the draft continues. Unless all of them were
        accepted nothing judges that draft.
        """
        by_slot = {
            slot: token_ids[unverified.get(slot, 0) :]
            for slot, token_ids in _came_by_slot(result, sequences).items()
        }
        came = [by_slot.get(slot, ()) for slot in drafts.slots.tolist()]
        self._teach(drafts.verdicts(came_tokens(came, drafts.token_ids.shape[1])))

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
        if len(learned.verdicts.slots):
            self._teach(learned.verdicts)
        by_model = learned.slots[learned.methods < FIRST_TEXT]
        if len(by_model):
            ends = {
                rows.slot: rows.start + len(rows.token_ids) - rows.num_drafts + len(outcome.token_ids)
                for rows, outcome in zip(plan.rows, result.sequences, strict=True)
            }
            self._state.set_draft_kv(by_model, [ends[slot] for slot in by_model.tolist()])

    def _teach(self, verdicts: Verdicts) -> None:
        """While a cached decision serves further steps, verdicts wait for its end."""
        self._acceptance.hold(verdicts)
        if self._state.decision_expired:
            self._acceptance.learn_held()


def _came_by_slot(result: StepResult, sequences: Many[Sequence]) -> dict[int, tuple[int, ...]]:
    """The tokens of the sequences that got any and are still running. sequences: of the result, in its order."""
    running = Status.RUNNING
    return {
        outcome.slot: outcome.token_ids
        for outcome, sequence in zip(result.sequences, sequences, strict=True)
        if outcome.token_ids and sequence.status is running
    }


def _cut_by_step(slots: Ints, result: StepResult) -> Ints | None:
    """[S] draft tokens of these slots that the step itself gave up before it verified them; None: none."""
    cut = {each.slot: each.num_cut for each in result.sequences if each.num_cut}
    return np.array([cut.get(slot, 0) for slot in slots.tolist()], dtype=np.int64) if cut else None
