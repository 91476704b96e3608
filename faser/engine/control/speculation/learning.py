"""Learning: what drafting and steps have taken, and what became of the drafts.

    launch     predict the step's time, and tell the guards that it begins
    drafting   the drafts are there: how long they took, and how likely they are
    learn      the step is done: what it accepted, and what it took

Owns the prediction of the last step, and which steps' times are learned. It decides nothing.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from faser.engine.contract.drafts import FIRST_TEXT, DraftTable
from faser.engine.contract.native_acceptance import SampledStep
from faser.engine.contract.plan import StepPlan, StepResult, StepSpan
from faser.engine.contract.step_times import Role
from faser.engine.control.sequence import Sequence, Status
from faser.engine.control.speculation.acceptance import (
    Acceptance,
    point_mass_outcomes,
    sampled_tokens,
    with_dropped,
)
from faser.engine.control.speculation.asking import Guards
from faser.engine.control.speculation.guard import GuardedStep
from faser.engine.control.speculation.overlap import OverlapControl
from faser.engine.control.speculation.state import SpeculationState
from faser.engine.control.speculation.statistics import SpeculationStatistics
from faser.engine.control.speculation.step_drafts import StepDrafts
from faser.engine.control.step_cost import CostModel, VerificationCost, steps_to_skip
from faser.engine.control.step_posterior import DRAFTED, KEPT, PLAIN
from faser.types.arrays import ONE, ZERO


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """Predicted time of a step, as of its launch.

    predicted_s: how long the step should take. verified: None: the step has prompts. guarded, overlapped: for the
    guards of drafts and of overlapped drafting; None: it was not asked.
    """

    predicted_s: float
    verified: VerificationCost | None
    guarded: GuardedStep | None = None
    overlapped: GuardedStep | None = None


@dataclass(frozen=True, slots=True)
class _LastStep:
    """A step whose end is not known yet. kind: of its gap, as of StepPosterior; None: of none."""

    kind: int | None
    num_sequences: int
    prediction: StepPrediction
    num_tokens: int


class Learning:
    """times_itself: the host time that drafting exposes counts as a cost of it; False where time is simulated.

    waits: drafts are looked up, and outcomes wait for the next price of a row.
    """

    def __init__(
        self,
        costs: CostModel,
        state: SpeculationState,
        acceptance: Acceptance,
        statistics: SpeculationStatistics,
        guards: Guards,
        overlap: OverlapControl,
        *,
        times_itself: bool,
    ) -> None:
        self._costs, self._state, self._acceptance = costs, state, acceptance
        self._statistics, self._guards, self._overlap = statistics, guards, overlap
        self._times_itself = times_itself
        self._last: _LastStep | None = None
        self._skipped = 0  # steps of which the times are not learned
        self.waits = False

    # Before a step.

    def look_up(self, run_s: float, count: int) -> None:
        """Drafts from text have been looked up for count sequences in run_s."""
        predicted_s = self._costs.text_s(count)
        if Role.TEXT in self._costs.tables:
            self._costs.observe(Role.TEXT, predicted_s, run_s)
        self._statistics.time_drafting(predicted_s, run_s)

    def drafting(self, step: StepDrafts, *, notes: bool) -> None:
        """Learn how long drafting took. Afterwards no KV is missing of those that the model drafted for.

        notes: the estimates take down how likely the drafts are.
        """
        drafts, lengths, missing_kv = step.drafts, step.table.lengths, step.candidates.sequences.missing_kv
        if not drafts.passes:
            self.look_up(drafts.run_s, len(lengths))
        else:
            self._statistics.count_catchup(drafts.catchup_tokens)
            by_model = step.table.methods < FIRST_TEXT
            modelled = lengths * by_model
            longest = max(modelled.tolist())
            predicted_s = self._costs.text_s(len(lengths))
            if longest:
                predicted_s = self._costs.draft_s(modelled, missing_kv)
                if not self._costs.in_blocks:  # a pass whose tokens were all dropped is not in the lengths
                    predicted_s *= drafts.passes / longest
                self._costs.observe(Role.PASS, predicted_s, drafts.run_s)
            self._statistics.time_drafting(predicted_s, drafts.run_s)
            if np.count_nonzero(missing_kv):
                self._state.extend_draft_kv(step.candidates.slots, missing_kv * by_model)
        if notes:
            self._note(step)

    def _note(self, step: StepDrafts) -> None:
        """Take down how likely the drafts are; those from text were noted before, where a model drafts too."""
        table, survival = step.table, step.survival
        if not self._costs.has_passes:
            self._acceptance.note_drafts(table.slots, step.lengths, table.lengths, survival, by_model=False)
            return
        by_model = (table.methods < FIRST_TEXT).nonzero()[0]
        slots, lengths, survival = table.slots[by_model], table.lengths[by_model], survival[by_model]
        if not len(slots):
            return
        if step.stop is not None:
            asked, passes, price = step.lengths[by_model], step.drafts.passes, step.stop.row_price
            lengths, survival = with_dropped(lengths, asked, survival, passes=passes, row_price=price)
        self._acceptance.note_drafts(slots, lengths, lengths, survival, by_model=True)

    def launch(self, plan: StepPlan) -> StepPrediction:
        """The step is about to run, or to wait for the one in flight."""
        num_sequences, num_rows, num_drafts = len(plan.rows), plan.num_rows, plan.num_drafts
        verified = None
        if num_rows == num_sequences + num_drafts:
            verified = self._costs.verification(num_rows, num_drafts, plan.kv_tokens, plan.kv_row_tokens)
            predicted_s = self._costs.seconds(verified)
        else:
            predicted_s = self._costs.step_s(num_rows, plan.kv_tokens, plan.kv_row_tokens)
        self._statistics.launch(drafts=num_drafts > 0)
        prompts = verified is None
        guarded = self._guards.launched(plan, self._plain_s, prompts=prompts)
        overlapped = None
        if guarded is not None and not prompts:
            overlapped = self._overlap.launched(guarded.num_sequences, guarded.plain_s)
        return StepPrediction(predicted_s=predicted_s, verified=verified, guarded=guarded, overlapped=overlapped)

    def _plain_s(self, plan: StepPlan) -> float:
        """Predict the seconds of the step without its drafts."""
        rows, computed = plan.rows, 0
        if plan.num_rows > len(rows) + plan.num_drafts:  # it has prompts
            columns = zip(rows.counts, rows.starts, rows.num_drafts, strict=True)
            computed = sum([(n - 1) * (2 * start + n) for n, start, gamma in columns if not gamma]) // 2
        return self._costs.by_table_s(plan.num_rows - plan.num_drafts, plan.kv_tokens, computed)

    # After a step.

    def learn(
        self,
        plan: StepPlan,
        result: StepResult,
        sequences: Many[Sequence],
        sampled: Many[tuple[int, ...]],
        *,
        prediction: StepPrediction,
        drafts: StepDrafts | None = None,
        overlapped: StepDrafts | None = None,
        last: StepSpan | None = None,
    ) -> None:
        """Take in what the step sampled, before its tokens are committed.

        sequences, sampled: of plan.rows, in their order; those that have ended meanwhile or failed teach nothing.
        drafts: that the step verified. overlapped: made during the step. last: as in Scheduler.commit.
        """
        with self._statistics.deciding():
            if result.draft_kv:
                for start, num_held in zip(plan.started, result.draft_kv, strict=True):
                    self._state.set_draft_kv(start.slot, num_held)
            step = SampledStep(_teaching(plan, result, sequences), result.counts, result.token_ids)
            self._learn_time(result, prediction, alone=overlapped is None)
            if overlapped is not None:
                self._learn_overlapped(plan, result, sampled, overlapped, verify_s=prediction.predicted_s)
            if drafts is not None and drafts.has_drafts:
                self._learn_verified(plan, result, drafts, step)
            else:
                self._count_undrafted(step, ())
                if drafts is not None and len(drafts.from_text.slots):
                    drafts.judge(self._acceptance, step)
                    self._learn_held()
            if overlapped is not None:
                unverified = dict(zip(plan.rows.slots, plan.rows.num_drafts, strict=True))
                self._learn_not_taken(overlapped.not_taken(), step.by_slot(), unverified)
        if self._last is not None and last is not None:
            self._learn_span(self._last, last, admits=bool(plan.started))
        kind: int | None = PLAIN
        if overlapped is not None or plan.started or prediction.verified is None:
            kind = None
        elif drafts is not None and not drafts.num_decided:
            kind = KEPT if plan.num_drafts else DRAFTED
        self._last = _LastStep(kind, len(plan.rows), prediction, sum(result.counts))

    def _learn_time(self, result: StepResult, prediction: StepPrediction, *, alone: bool) -> None:
        """Compare the step's time with the prediction. alone: nothing was drafted meanwhile."""
        self._statistics.count_mode()
        self._statistics.pruning = result.pruning
        self._skipped -= 1
        if not alone or self._skipped >= 0 or result.num_cut:
            return
        predicted_s, device_s = prediction.predicted_s, result.run_s - result.prepared_s
        self._skipped = steps_to_skip(device_s)
        self._costs.observe(Role.STEP, predicted_s, device_s)
        self._statistics.time_step(predicted_s, device_s)
        if prediction.verified is not None:
            self._costs.observe_verification(prediction.verified, device_s, experts=result.experts)

    def _learn_span(self, step: _LastStep, span: StepSpan, *, admits: bool) -> None:
        """The step is over, and so has all that it left to do. admits: sequences were admitted after it."""
        guarded, overlapped = step.prediction.guarded, step.prediction.overlapped
        if admits and not (guarded is not None and guarded.prompts):
            return
        if step.kind is not None and self._times_itself:
            self._costs.posterior.observe_gap(step.num_sequences, span.gap_s, step.kind)
        guard = self._guards.current
        if guarded is not None and step.num_tokens and span.seconds > 0 and guard is not None:
            guard.observe(guarded, step.num_tokens, span.seconds)
            if overlapped is not None:
                self._overlap.observe(overlapped, step.num_tokens, span.seconds)

    def _learn_verified(self, plan: StepPlan, result: StepResult, step: StepDrafts, sampled: SampledStep) -> None:
        """A step has verified drafts. A sequence that was preempted meanwhile or failed teaches nothing."""
        slots, kept, num_cut = step.table.slots, step.kept, None
        if result.num_cut:
            cut = {plan.rows.slots[position]: count for position, count in result.num_cut.items()}
            num_cut = np.array([cut.get(slot, 0) for slot in slots.tolist()], dtype=np.int64)
            kept = kept - num_cut
        accepted = step.judge(self._acceptance, sampled, num_cut)
        self._learn_held()
        table, survival = step.table, step.survival
        if np.count_nonzero(accepted < ZERO):
            at = (accepted >= ZERO).nonzero()[0]
            table, survival, kept, accepted = table.take(at), survival[at], kept[at], accepted[at]
            num_cut = None if num_cut is None else num_cut[at]
        if self._costs.has_passes and not step.num_decided:
            self._state.extend_draft_kv(table.slots, (table.methods < FIRST_TEXT) * (accepted + ONE))
        if num_cut is not None:
            self._statistics.count_pruned_rows(table.methods, num_cut)
        self._statistics.count_drafts(table, kept, survival, accepted, num_decided=step.num_decided)
        if len(sampled.slots) > len(slots):
            self._count_undrafted(sampled, slots.tolist())

    def _count_undrafted(self, sampled: SampledStep, drafted: Many[int]) -> None:
        """The sequences but for those in the slots `drafted` got a token without a draft, if they go on."""
        slots = sampled.slots
        if drafted or 0 in sampled.counts or -1 in slots:
            others = {-1, *drafted}
            pairs = zip(slots, sampled.counts, strict=True)
            slots = [slot for slot, count in pairs if count and slot not in others]
        self._statistics.count_undrafted(slots)

    def _learn_not_taken(
        self, drafts: DraftTable, by_slot: Mapping[int, tuple[int, ...]], unverified: Mapping[int, int]
    ) -> None:
        """Learn from drafts from text that were made during the step, in whose place another draft was taken.

        by_slot: tokens of the sequences that go on. One that was preempted meanwhile teaches nothing: its slot may
        be taken. unverified: by slot, tokens that the step verified and the draft continues. Unless all of them
        were accepted nothing decides that draft.
        """
        if not len(drafts.slots):
            return
        sampled = [by_slot.get(slot, ())[unverified.get(slot, 0) :] for slot in drafts.slots.tolist()]
        self._acceptance.hold(point_mass_outcomes(drafts, sampled_tokens(sampled, drafts.width)))
        self._learn_held()

    def _learn_overlapped(
        self,
        plan: StepPlan,
        result: StepResult,
        sampled: Many[tuple[int, ...]],
        step: StepDrafts,
        *,
        verify_s: float,
    ) -> None:
        """The step and the drafts made during it are done. verify_s: what the step should have taken alone.

        Afterwards a draft model's cache holds every token up to the last one that the step sampled.
        """
        self._statistics.count_catchup(step.drafts.catchup_tokens)
        unverified = {rows.slot: rows.token_ids[len(rows.token_ids) - rows.num_drafts :] for rows in plan.rows}
        by_slot = dict(zip(plan.rows.slots, sampled, strict=True))
        learned = self._overlap.learn(
            result, step.drafts, requested=step.lengths, unverified=unverified, sampled=by_slot, verify_s=verify_s
        )
        self._statistics.time_lanes(
            (learned.verify_s, result.run_s), (learned.draft_s, step.drafts.run_s), learned.overlap_s
        )
        table = step.table
        self._statistics.count_dropped(table.slots, table.methods, learned.dropped)
        if len(learned.outcomes.decided):
            self._acceptance.hold(learned.outcomes)
            self._learn_held()
        by_model = table.slots[table.methods < FIRST_TEXT]
        if len(by_model):
            rows = plan.rows
            columns = zip(rows.slots, rows.starts, rows.counts, rows.num_drafts, strict=True)
            ends = {slot: start + count - gamma + len(by_slot[slot]) for slot, start, count, gamma in columns}
            self._state.set_draft_kv(by_model, [ends[slot] for slot in by_model.tolist()])

    def _learn_held(self) -> None:
        """While a cached decision serves further steps, outcomes wait for its end, and for the next price."""
        if not self.waits and self._state.decision_expired:
            self._acceptance.learn_held()


def _teaching(plan: StepPlan, result: StepResult, sequences: Many[Sequence]) -> list[int]:
    """Return the slots of the plan's rows, -1 in place of sequences that have ended meanwhile or failed."""
    running, errors, slots = Status.RUNNING, result.errors, plan.rows.slots
    if not errors and [each.status for each in sequences].count(running) == len(sequences):
        return slots
    ended = [at in errors or each.status is not running for at, each in enumerate(sequences)]
    return [-1 if has_ended else slot for slot, has_ended in zip(slots, ended, strict=True)]
