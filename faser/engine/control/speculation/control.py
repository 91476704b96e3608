"""SpeculationControl: the order of a step with speculation.

The scheduler calls it, in this order:

    a step whose drafts are made before it    decide, first_round, drafted (until it returns drafts), keep,
                                              launch, learn
    a step without drafts                     decide (returns None), launch, learn
    a step with overlapped drafting           decide (returns None), chunks, launch, decide_overlapped,
                                              launch_overlapped, learn

DraftDecider asks the policy, which reads the estimates of Acceptance and CostModel. OutcomeLearner updates these
estimates after the step. SpeculationState holds what decisions need of each sequence, SpeculationStatistics the
counters for reports.
"""

import time
from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from faser.config.speculation import AUTO, DRAFT_METHODS, MOST_STATES_READ, SpeculationConfig
from faser.engine.contract.plan import (
    DraftPlan,
    Drafts,
    SequenceResult,
    SequenceRows,
    StepPlan,
    StepResult,
    StopRule,
)
from faser.engine.contract.step_times import Role
from faser.engine.control.sequences.sequence import Sequence
from faser.engine.control.speculation.acceptance.draft_arrays import (
    FIRST_TEXT,
    DraftArrays,
    DraftReader,
    ReadDrafts,
    with_dropped,
)
from faser.engine.control.speculation.acceptance.estimator import Acceptance
from faser.engine.control.speculation.decision import DraftDecision, OtherRows, OverlapDecision
from faser.engine.control.speculation.draft_decider import DraftDecider, RequestedDrafts, Room
from faser.engine.control.speculation.drafter_selection import DrafterSelection, TextRound
from faser.engine.control.speculation.outcome_learner import OutcomeLearner
from faser.engine.control.speculation.overlap.control import OFF, OverlapControl, OverlapOptions
from faser.engine.control.speculation.policies.policy import Floats, Ints, Policy
from faser.engine.control.speculation.policies.registry import make_policy
from faser.engine.control.speculation.state import SpeculationState
from faser.engine.control.speculation.statistics import SERIAL, SpeculationStatistics
from faser.engine.control.timing.clock import Clock
from faser.engine.control.timing.cost_model import CostModel
from faser.engine.control.timing.host_gap import GapKind
from faser.errors import ConfigError
from faser.types import PruneStats, SpeculationStats, SpeculationSummary, StepTrace

_token_ids = attrgetter("token_ids")


@dataclass(frozen=True, slots=True)
class _PredictedStep:
    """predicted_s: how long the step should take. verified: rows, draft rows, cached tokens of its sequences and
    of draft rows; None: the step has prompts. undrafted_s, token_s: how long the step should take without its
    draft rows, and each accepted token in a further step without drafts; 0 if the step has no draft rows.
    """

    predicted_s: float
    verified: tuple[int, int, int, int] | None
    undrafted_s: float = 0.0
    token_s: float = 0.0


class SpeculationControl:
    """One per engine with a drafter. policy: None makes the one that config names.

    details: summaries of requests list every draft. overlap: None never overlaps. times_itself: the host time that
    drafting exposes counts as a cost of it; False where time is simulated.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        costs: CostModel,
        *,
        num_slots: int,
        clock: Clock,
        policy: Policy | None = None,
        details: bool = False,
        overlap: OverlapOptions | None = None,
        times_itself: bool = True,
    ) -> None:
        cap = config.cap
        self._config, self._costs, self._times_itself = config, costs, times_itself
        self._cap = cap
        self._is_point_mass = config.draft_sample_method != "probabilistic"
        self._acceptance = Acceptance(num_slots, cap)
        self._state = SpeculationState(
            num_slots,
            cap,
            clock,
            looks_up=not costs.has_passes,
            catches_up=config.needs_draft_model or config.needs_head,
            most_missing=MOST_STATES_READ if config.needs_head else None,
        )
        self._statistics = SpeculationStatistics(
            num_slots, cap, (*config.classes,), partition=overlap.name if overlap else SERIAL, details=details
        )
        self._overlap: OverlapControl | None = None
        self._fallback = ""
        if overlap is not None:
            self._overlap = OverlapControl(costs, self._acceptance, self._state.frontiers, overlap, cap=cap)
            self._fallback = overlap.fallback
        self._decider = DraftDecider(
            policy or make_policy(config, costs, self._acceptance),
            self._acceptance,
            self._state,
            self._statistics,
            self._overlap,
            costs,
            cap=cap,
            by_model=costs.has_passes,
        )
        self._learner = OutcomeLearner(costs, self._acceptance, self._state, self._statistics)
        self._reader = DraftReader(cap)
        self._selection: DrafterSelection | None = None
        if config.method == AUTO:
            self._selection = DrafterSelection(self._acceptance, has_model=config.needs_passes)
        self._requested: RequestedDrafts | None = None
        self._drafted: DraftArrays | None = None
        self._committed: DraftArrays | None = None  # the drafts of the step that was learned last
        self._timed: tuple[GapKind, int, float] | None = None  # that step, while its gap is not over
        self._not_chosen: ReadDrafts | None = None  # drafts from text in whose place another draft was taken
        self._all_text: TextRound | None = None  # the round whose drafts from text are all drafts of the step
        self._in_flight: deque[_PredictedStep] = deque()
        self._pruning: PruneStats | None = None  # the data plane's latest

    def use_policy(
        self, name: str, gamma: int | None = None, *, forget: bool = True, overlap: str | None = None
    ) -> None:
        """From the next step on another policy decides. gamma: of `fixed`, or another policy's cap.

        forget: what was learned about acceptance is dropped, of running sequences too. overlap: as in the setting
        spec_overlap; None: as configured. Raises ConfigError for an unknown policy, for a gamma beyond the
        engine's cap, and for overlap on an engine without lanes.
        """
        if gamma is not None and not 1 <= gamma <= self._cap:
            raise ConfigError(f"gamma is {gamma}; this engine drafts at least 1 and at most {self._cap} tokens")
        if overlap not in (None, OFF) and self._overlap is None:
            raise ConfigError(f"overlap is {overlap}; this engine has no lanes for overlapped drafting")
        self._acceptance.learn_held()
        self._state.drop_decision()
        if forget:
            self._acceptance.forget()
        config = replace(self._config, policy=name, num_speculative_tokens=gamma or self._cap)
        self._decider.use_policy(make_policy(config, self._costs, self._acceptance), gamma or self._cap)
        if self._overlap is not None:
            self._overlap.reset(overlap)

    @property
    def drafts_overlapped(self) -> bool:
        """At present drafts are made concurrently with steps, not before them."""
        return self._overlap is not None and self._overlap.lanes is not None

    def may_overlap(self, plan: StepPlan) -> bool:
        """Drafts may be made concurrently with this step."""
        return self._overlap is not None and self._overlap.takes(plan)

    @property
    def step_drafts(self) -> bool:
        """The step that is being made verifies drafts, or drafts may be made concurrently with it."""
        return self._requested is not None or self._drafted is not None or self.drafts_overlapped

    def start(self, sequence: Sequence) -> None:
        """The sequence takes over its slot."""
        slot, teaches = sequence.held_slot, not sequence.sampling.edits_logits
        self._state.start(sequence)
        self._acceptance.start(slot, teaches=teaches, samples=not sequence.sampling.greedy)
        self._statistics.start(slot, sequence.request.speculation.class_name)

    def release(self, sequence: Sequence) -> None:
        """The sequence leaves its slot, for good or until it is admitted again."""
        sequence.speculated = self.summary(sequence)
        self._state.release(sequence)
        self._acceptance.release(sequence.held_slot)
        self._statistics.release(sequence.held_slot)

    def summary(self, sequence: Sequence) -> SpeculationSummary:
        """What speculation has done so far for a sequence that has a slot."""
        return self._statistics.summary(sequence.held_slot, sequence.speculated, self._decider.policy.name)

    def trace(self, rows: SequenceRows, outcome: SequenceResult) -> StepTrace:
        """Where the tokens of one sequence come from, in the step that was learned last."""
        gamma = rows.num_drafts - outcome.num_cut
        if self._committed is None or not gamma:
            return StepTrace()
        drafts = self._committed.drafts
        (at,) = np.flatnonzero(drafts.slots == rows.slot)
        drafter = DRAFT_METHODS[drafts.methods[at]]
        return StepTrace(drafter=drafter, gamma=gamma, accepted=len(outcome.token_ids) - 1)

    def stats(self) -> SpeculationStats:
        return self._statistics.snapshot(
            policy=self._decider.policy.name,
            method=self._config.method,
            roles=self._costs.stats(),
            cycle=None if self._overlap is None else self._overlap.stats(),
            draft_share=0.0 if self._overlap is None else self._overlap.share,
            partition_fallback=self._fallback,
            pruning=self._pruning,
        )

    def decide(
        self, sequences: Many[Sequence], others: OtherRows, *, budget: int, room: Room
    ) -> DraftDecision | None:
        """Which sequences draft before the next step; None: the step has no such drafts.

        sequences: that may draft. budget: rows of a step. room: how many of the given tokens have KV blocks.
        """
        began = time.perf_counter()
        requested = self._decider.decide(sequences, others, budget, room)
        decision = None
        if requested is not None:
            self._requested = requested
            decision = DraftDecision(
                chosen=tuple(requested.chosen), lengths=tuple(requested.lengths.tolist()), stop=requested.stop
            )
        self._statistics.time_deciding(time.perf_counter() - began)
        return decision

    def first_round(self, plan: DraftPlan) -> DraftPlan:
        """The plan to send for these requests first: the plan itself, or one for the text look-up."""
        return plan if self._selection is None else self._selection.first_round(plan)

    def drafted(self, drafts: Drafts) -> Drafts | DraftPlan:
        """The drafts of all requests, or the plan for the requests that are left to the draft model."""
        if self._selection is None:
            return drafts
        began = time.perf_counter()
        answer = self._second_round(self._selection, drafts)
        self._statistics.time_deciding(time.perf_counter() - began)
        return answer

    def keep(self, drafts: Drafts) -> list[tuple[int, ...]]:
        """The draft tokens to verify, in the order of the decision."""
        began = time.perf_counter()
        kept = self._keep(drafts)
        self._statistics.time_deciding(time.perf_counter() - began)
        return kept

    def chunks(self, sequences: Many[Sequence], others: OtherRows, *, budget: int) -> list[tuple[int, ...]]:
        """What the next step verifies of the drafts made during the last one, in the order of sequences.

        Arguments as in decide.
        """
        if self._overlap is None or self._overlap.lanes is None:
            return [()] * len(sequences)
        began = time.perf_counter()
        chunks, self._drafted = self._decider.chunks(sequences, others, budget, self._overlap)
        self._statistics.time_deciding(time.perf_counter() - began)
        return chunks

    def decide_overlapped(
        self, sequences: Many[Sequence], num_unverified: Many[int], *, budget: int, room: Room
    ) -> OverlapDecision | None:
        """Which sequences draft concurrently with the step that is about to run; None: no sequence does.

        sequences: that may draft, with num_unverified draft tokens each in the step. budget, room: as in decide;
        room is asked about those tokens and the new ones together.
        """
        if self._overlap is None or self._overlap.lanes is None:
            return None
        began = time.perf_counter()
        decision = self._decider.decide_overlapped(sequences, num_unverified, budget, room, self._overlap)
        self._statistics.time_deciding(time.perf_counter() - began)
        return decision

    def skip_policy(self, count: int) -> bool:
        """Whether the next step, of count sequences, has no drafts, whatever the step in flight brings.

        If so it counts as a step for which the policy was not asked. 0 sequences: the step has prompts alone.
        """
        if self.drafts_overlapped:
            return False
        return not count or self._decider.skip_policy(count, launches_ahead=True)

    def launch(self, plan: StepPlan) -> None:
        """The step is about to run, or to wait for the one in flight."""
        num_drafts, num_rows = sum([rows.num_drafts for rows in plan.rows]), plan.num_rows
        verified = None
        if num_rows == len(plan.rows) + num_drafts:
            verified = (num_rows, num_drafts, plan.kv_tokens, plan.kv_row_tokens)
            predicted_s = self._costs.verification_s(*verified)
        else:
            predicted_s = self._costs.step_s(num_rows, plan.kv_tokens, plan.kv_row_tokens)
        undrafted_s = token_s = 0.0
        if num_drafts:
            decode_s = self._costs.step_s(len(plan.rows), plan.kv_tokens)
            token_s = decode_s / len(plan.rows)
            undrafted_s = decode_s if verified else self._costs.step_s(num_rows - num_drafts, plan.kv_tokens)
        self._in_flight.append(_PredictedStep(predicted_s, verified, undrafted_s, token_s))
        self._statistics.launch(drafts=num_drafts > 0)

    def launch_overlapped(self, decision: OverlapDecision, unverified: tuple[tuple[int, ...], ...]) -> None:
        """The drafts of the decision are about to be made; they continue these unverified tokens."""
        assert self._overlap is not None
        self._statistics.launch_overlapped()
        self._overlap.launch(decision.slots, decision.lengths, unverified)

    def learn(
        self,
        plan: StepPlan,
        result: StepResult,
        sequences: Many[Sequence],
        overlapped: Drafts | None = None,
        *,
        last_gap_s: float | None = None,
    ) -> None:
        """Take in what the step brought, before its tokens are committed.

        sequences: of plan.rows, in their order; those that have ended meanwhile teach nothing. overlapped: the
        drafts made during the step. last_gap_s: as in Scheduler.commit.
        """
        began = time.perf_counter()
        step = self._in_flight.popleft()
        self._pruning = result.pruning
        for start, num_held in zip(plan.started, result.draft_kv, strict=False):  # empty without a draft model
            self._state.set_draft_kv(start.slot, num_held)
        predicted_s = step.predicted_s - result.saved_s
        self._statistics.count_mode()
        if overlapped is None:
            device_s = result.run_s - result.prepared_s
            self._costs.observe(Role.STEP, predicted_s, device_s)
            self._statistics.time_step(predicted_s, device_s)
            if step.verified is not None and not result.saved_s:
                self._costs.observe_verification(*step.verified, device_s)
        else:
            assert self._overlap is not None
            self._learner.learn_overlapped(plan, result, overlapped, self._overlap, verify_s=predicted_s)
        if self._drafted is None:
            self._learner.learn_undrafted(plan, sequences)
            num_accepted = 0
        else:
            num_accepted = self._learner.learn_verified(self._drafted, result, sequences)
        undrafted_s = step.undrafted_s or result.run_s - result.prepared_s  # without draft rows: what it took
        self._statistics.time_plain(undrafted_s + num_accepted * step.token_s)
        if self._not_chosen is not None:
            unverified = {} if overlapped is None else {rows.slot: rows.num_drafts for rows in plan.rows}
            self._learner.learn_not_chosen(self._not_chosen, result, sequences, unverified)
        kind = self._gap_kind(plan, overlapped, has_prompts=step.verified is None)
        self._committed = self._drafted
        self._requested = self._drafted = self._not_chosen = self._all_text = None
        self._statistics.time_deciding(time.perf_counter() - began)
        deciding_s = self._statistics.end_step()
        if self._timed is not None and last_gap_s is not None and not plan.started:
            last_kind, num_sequences, last_deciding_s = self._timed
            self._costs.host_gaps.observe(last_kind, last_gap_s, num_sequences, deciding_s=last_deciding_s)
        self._timed = (kind, len(plan.rows), deciding_s) if self._times_itself and kind is not None else None

    def _gap_kind(self, plan: StepPlan, overlapped: Drafts | None, *, has_prompts: bool) -> GapKind | None:
        """What the step's gap is an example of; None: of nothing, as the step has prompts or new sequences."""
        asked = self._decider.take_asked()
        if plan.is_async:
            return GapKind.AHEAD
        if plan.started or has_prompts:
            return None
        if overlapped is not None:
            return GapKind.OVERLAPPED
        if self._requested is not None:
            return GapKind.DRAFTED
        return GapKind.ASKED if asked else GapKind.UNASKED

    def _second_round(self, selection: DrafterSelection, drafts: Drafts) -> Drafts | DraftPlan:
        self._all_text = None
        if selection.waits_for_model:
            return selection.complete(drafts)
        found = selection.choose_text(drafts)
        lengths, stop = self._left_to_model(found) if selection.has_model else (np.zeros_like(found.lengths), None)
        self._not_chosen = found.not_taken(lengths)
        model_plan = selection.leave_to_model(found, lengths, stop) if selection.has_model else None
        if model_plan is not None:
            return model_plan
        self._all_text = found
        return replace(drafts, drafts=found.drafts)

    def _left_to_model(self, found: TextRound) -> tuple[Ints, StopRule | None]:
        """[S] tokens that the model drafts in place of a request's draft from text, and when it stops."""
        requests = found.plan.requests
        slots = np.array([each.slot for each in requests], dtype=np.int64)
        limit = np.minimum([each.max_tokens for each in requests], self._config.model_cap)
        survival = self._acceptance.survival(slots, by_model=True)
        if found.plan.share is not None:  # the model drafts during a step, so its passes cost the step nothing
            by_model = np.add.reduce(survival[:, 1:], axis=1)
            return np.where(by_model > np.add.reduce(found.survival[:, 1:], axis=1), limit, 0), None
        assert self._requested is not None, "drafts come exactly when they were requested"
        candidates = replace(self._requested.candidates, limit=limit, survival=survival)
        self._acceptance.note_drafts(slots, self._requested.lengths, found.lengths, found.survival, by_model=False)
        policy = self._decider.policy
        lengths = policy.model_lengths(candidates, candidates.drafted(found.lengths, found.survival))
        drafting = lengths.nonzero()[0]
        if not len(drafting):
            return lengths, None
        stop = policy.stop_rule(candidates.among(drafting), lengths[drafting])
        self._requested.lengths = np.where(lengths > 0, lengths, self._requested.lengths)
        self._requested.stop = stop
        return lengths, stop

    def _keep(self, drafts: Drafts) -> list[tuple[int, ...]]:
        assert self._requested is not None, "drafts come exactly when they were requested"
        candidates, policy = self._requested.candidates, self._decider.policy
        if not drafts.passes and not any(map(_token_ids, drafts.drafts)):
            lengths = np.zeros_like(self._requested.lengths)
            self._learner.learn_look_up(drafts, len(lengths))
            if self._requested.is_new and not self._costs.has_passes:
                self._acceptance.note_nothing_found(candidates.slots)
            if self._is_point_mass:
                policy.keep(candidates, lengths)  # so that it learns of the empty drafts
            return [()] * len(lengths)
        read, survival = self._read(drafts, candidates.slots)
        self._learner.learn_drafting(drafts, candidates, read.methods, read.lengths)
        if self._requested.is_new:
            self._note(read, survival, drafts.passes)
        kept = read.lengths
        if self._is_point_mass:
            kept = policy.keep(candidates.drafted(kept, survival), kept)
        self._drafted = DraftArrays(drafts=read, kept=kept, survival=survival, drawn=not self._is_point_mass)
        return [each.token_ids[:length] for each, length in zip(drafts.drafts, kept.tolist(), strict=True)]

    def _read(self, drafts: Drafts, slots: Ints) -> tuple[ReadDrafts, Floats]:
        """The drafts as arrays, and their survival; both are there already where all drafts are from text."""
        found = self._all_text
        if found is not None and found.read is not None:
            return found.read.among(found.chosen), found.survival
        read = self._reader.read(drafts.drafts, slots)
        return read, self._acceptance.drafted_survival(read.slots, read.methods, read.lengths, read.confidences)

    def _note(self, read: ReadDrafts, survival: Floats, passes: int) -> None:
        """Take down how likely the drafts are; those from text were noted before, where a model drafts too."""
        assert self._requested is not None
        requested, stop = self._requested.lengths, self._requested.stop
        if not self._costs.has_passes:
            self._acceptance.note_drafts(read.slots, requested, read.lengths, survival, by_model=False)
            return
        by_model = slice(None) if self._selection is None else (read.methods < FIRST_TEXT).nonzero()[0]
        slots, lengths, survival = read.slots[by_model], read.lengths[by_model], survival[by_model]
        if not len(slots):
            return
        if stop is not None:
            lengths, survival = with_dropped(
                lengths, requested[by_model], survival, passes=passes, row_price=stop.row_price
            )
        self._acceptance.note_drafts(slots, lengths, lengths, survival, by_model=True)
