"""SpeculationControl: which sequences draft before a step, what of it is verified, and what is learned from it.

    decide             ask the policy; StepDrafts: the drafts of one step, from this decision to the step's outcome
    drafted            the drafts have come: where text and a model draft, first those from text, then the model's
    keep               the policy cuts them
    launch             predict the step's time
    learn              the step is done: what became of its drafts, and what it took

A step without drafts has launch and learn alone. Where drafts come from text alone, decide only has them looked
up, and keep asks the policy about those that may be worth a row. Where drafts are made during steps (overlap.py),
chunks stands in place of the first three, and decide_overlapped and drafted make the drafts of the step after.

Where text and a model draft (method `auto`), the text look-up answers first, with a draft of every method for
every sequence: it costs next to nothing. Of these a sequence gets the one with the most expected tokens (without a
model, the one worth most beyond the price of its rows); then the policy says for which sequences the model drafts
instead. The choice depends on committed tokens and the load alone, so it leaves the distribution of the output as
it is. A text draft that is not taken teaches the estimates too, since it
can be compared with the tokens that the step samples anyway. (arXiv 2601.11580 finds more to win in the choice of
the drafter than in the length of the draft.)
"""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from faser.config.speculation import AUTO, DRAFT_METHODS, PROMPT_ROWS, SpeculationConfig
from faser.engine.contract.drafts import FIRST_TEXT, Drafts, DraftTable, Ints
from faser.engine.contract.native_acceptance import MakeNativeAcceptance, SampledStep, Texts
from faser.engine.contract.plan import DrafterCheck, DraftPlan, StepPlan, StepResult, StepSpan
from faser.engine.contract.step_times import Role
from faser.engine.control.clock import Clock
from faser.engine.control.sequence import Sequence, Status
from faser.engine.control.speculation.acceptance import (
    Acceptance,
    point_mass_outcomes,
    sampled_tokens,
    with_dropped,
)
from faser.engine.control.speculation.asking import Guards, Pauses
from faser.engine.control.speculation.drafter_watch import DrafterWatch
from faser.engine.control.speculation.guard import GuardedStep
from faser.engine.control.speculation.overlap import OFF, OverlapControl, OverlapOptions
from faser.engine.control.speculation.policies import make_policy
from faser.engine.control.speculation.policy import Candidates, DraftingSequences, Policy, StepFacts
from faser.engine.control.speculation.state import Batch, CachedDecision, SpeculationState
from faser.engine.control.speculation.statistics import GAIN, LOAD, MEMORY, REQUEST, SERIAL, SpeculationStatistics
from faser.engine.control.speculation.step_drafts import StepDrafts
from faser.engine.control.step_cost import CostModel, VerificationCost, steps_to_skip
from faser.engine.control.step_posterior import DRAFTED, KEPT, PLAIN
from faser.errors import ConfigError
from faser.types.answer import SpeculationSummary, StepTrace
from faser.types.statistics import SpeculationStats

FASER = "faser"  # the policy with an objective that overlapped drafting shares
_PRICED_STEPS = 4  # that look up drafts: these share a price of a row, and outcomes are learned after them
_PLENTY = 1 << 30  # tokens to be generated yet, where missing KV has no price
_ZERO = np.array(0)
_BONUS = np.array(1)  # token of a step after the accepted ones
_NO_CANDIDATES = Candidates.alike(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.ones((0, 1)))

Room = Callable[[list[Sequence], list[int]], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRows:
    """The rows of a step in addition to those of the sequences that may draft.

    rows: how many there are. sequences: how many of them bring a sequence its next token.
    """

    rows: int
    sequences: int

    @property
    def has_prompts(self) -> bool:
        return self.rows > self.sequences


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
    guarded: GuardedStep | None
    overlapped: GuardedStep | None
    num_tokens: int


class SpeculationControl:
    """One per engine with a drafter. policy: None makes the one that config names.

    details: summaries of requests list every draft. overlap: None never overlaps. times_itself: the host time that
    drafting exposes counts as a cost of it; False where time is simulated. guarded: where drafts made before steps
    turn out not to pay, no sequence drafts (Guard), under any policy that is not told how much to draft.
    make_native: as in Acceptance. acceptance: None makes one. texts: in which decisions look up drafts by
    themselves, where acceptance is native;
    None: plans ask the data plane for them.

    A decision for a large batch serves several steps (CachedDecision). While no sequence drafts, the policy
    pauses: 1, 2, 3, 4, 8, 16, 32 steps, and less where sequences come or go.
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
        guarded: bool = True,
        make_native: MakeNativeAcceptance,
        acceptance: Acceptance | None = None,
        texts: Texts | None = None,
    ) -> None:
        cap = config.cap
        self._config, self._costs, self._times_itself = config, costs, times_itself
        self.cap = cap
        self._model_cap = min(config.model_cap, costs.block_tokens or cap)
        self._limit = min(cap, self._model_cap) if costs.in_blocks and not config.drafts_from_text else cap
        self._is_point_mass = config.draft_sample_method != "probabilistic"
        self.in_rounds = config.method == AUTO  # text drafts first, then a model if there is one
        self._acceptance = acceptance or Acceptance(num_slots, cap, make_native)
        self._texts = texts
        self._state = SpeculationState(
            num_slots,
            cap,
            clock,
            looks_up=not costs.has_passes,
            catches_up=config.needs_draft_model or config.needs_head,
            most_missing=PROMPT_ROWS if config.needs_head else None,
        )
        options = overlap or OverlapOptions(name=SERIAL, share=0.0)
        self._watch = DrafterWatch(num_slots)
        self._statistics = SpeculationStatistics(
            num_slots, cap, (*config.classes,), partition=options.name, details=details, watch=self._watch
        )
        self._overlap = OverlapControl(costs, self._acceptance, self._state.frontiers, options)
        self._fallback = options.fallback
        self._policy = policy or make_policy(config, costs, self._acceptance)
        self._unknown = np.ones((num_slots, cap + 1))  # survival of drafts of which nothing is asked
        self._row_price, self._priced_for, self._price_age = 0.0, 0, 0
        self._pauses = Pauses()
        self._last: _LastStep | None = None
        self._skipped = 0  # steps of which the times are not learned
        self._guards = Guards(enabled=guarded)
        self._guards.use(self._policy.name, is_guarded=self._policy.is_guarded, forget=False)

    # What the scheduler says of policies and sequences.

    speculates = True

    def drafter_check(self) -> DrafterCheck | None:
        return self._watch.next_check()

    def drafter_checked(self, check: DrafterCheck, *, differed: bool) -> None:
        self._watch.checked(check, differed=differed)

    def use_policy(
        self, name: str, gamma: int | None = None, *, forget: bool = True, overlap: str | None = None
    ) -> None:
        """From the next step on another policy decides. gamma: of `fixed`, or another policy's cap.

        forget: what was learned about acceptance, of running sequences too, and about what drafts gain is dropped.
        overlap: as in the setting spec_overlap; None: as configured. Raises ConfigError for an unknown policy, for
        a gamma beyond the cap, and for overlap on an engine without lanes.
        """
        if gamma is not None and not 1 <= gamma <= self.cap:
            raise ConfigError(f"gamma is {gamma}; this engine drafts at least 1 and at most {self.cap} tokens")
        if overlap not in (None, OFF) and not self._overlap.has_lanes:
            raise ConfigError(f"overlap is {overlap}; this engine has no lanes for overlapped drafting")
        limit = gamma or self.cap
        config = replace(self._config, policy=name, num_speculative_tokens=limit)
        self._policy, self._limit = make_policy(config, self._costs, self._acceptance), limit
        self._acceptance.learn_held()
        self._state.drop_decision()
        if forget:
            self._acceptance.forget()
        self._guards.use(name, is_guarded=self._policy.is_guarded, forget=forget)
        self._pauses.restart()
        self._priced_for = self._price_age = 0
        self._overlap.reset(overlap)

    def start(self, sequence: Sequence) -> None:
        """The sequence takes over its slot."""
        slot, teaches = sequence.held_slot, not sequence.sampling.edits_logits
        self._state.start(sequence)
        self._acceptance.start(slot, teaches=teaches, samples=not sequence.sampling.greedy)
        self._statistics.start(slot, sequence.request.speculation.class_name)
        self._watch.start(slot, sequence.num_tokens, has_hit=sequence.num_computed > 0, is_watched=teaches)

    def release(self, sequence: Sequence) -> None:
        """The sequence leaves its slot, for good or until it is admitted again."""
        sequence.speculated = self.summary(sequence)
        self._state.release(sequence)
        self._acceptance.release(sequence.held_slot)
        self._statistics.release(sequence.held_slot)
        self._watch.release(sequence.held_slot)

    def summary(self, sequence: Sequence) -> SpeculationSummary:
        """Summarize what speculation has done so far for a sequence that has a slot."""
        return self._statistics.summary(sequence.held_slot, sequence.speculated, self._policy.name)

    def stats(self) -> SpeculationStats:
        return self._statistics.snapshot(
            policy=self._policy.name,
            method=self._config.method,
            roles=self._costs.stats(),
            cycle=self._overlap.stats() if self._overlap.has_lanes else None,
            draft_share=self._overlap.share,
            partition_fallback=self._fallback,
            paid=self._guards.paid(),
            balance=self._guards.balance(),
        )

    def saved(self) -> dict[str, Any]:
        """Return what was learned of the cost and the gain of drafts, for a later run."""
        return {
            "prices": self._costs.posterior.saved(),
            "guards": self._guards.saved(),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Begin with what an earlier run has saved.

        Raises ValueError, KeyError or TypeError for anything else, and changes nothing then.
        """
        guards = saved["guards"]
        Guards(enabled=True).restore(guards)  # raises before anything is changed
        self._costs.posterior.restore(saved["prices"])
        self._guards.restore(guards)

    # Before a step.

    def passes_over(self, count: int, *, prompts: bool) -> bool:
        """Return whether the next step can be launched before the one in flight has ended: no drafts depend on it.

        count: sequences that decode. prompts: the step computes some. Such a step counts as one for which the
        policy was not asked.
        """
        self._guards.permission = None
        if self.drafts_overlapped or not count:
            return not self.drafts_overlapped
        return self._passes(count, others=0, prompts=prompts)

    def _passes(self, count: int, *, others: int, prompts: bool) -> bool:
        """Return whether the policy is not asked about the next step, of count sequences, and count such a step.

        others: further sequences, which may not draft. prompts: the step computes some.
        """
        self._guards.permission = None
        may_draft = self._state.any_may_draft
        if (
            may_draft
            and not self._policy.never_drafts
            and (self._overlap.is_forced or self._guards.allow(count + others, prompts=prompts))
            and self._pauses.has_ended(count, self._state.num_changes)
        ):
            return False
        if self._guards.permission is False:
            self._overlap.stop()
        self._pauses.skip()
        self._statistics.count_bypasses(GAIN if may_draft else REQUEST, count)
        return True

    def decide(
        self, sequences: Many[Sequence], others: OtherRows, *, budget: int, room: Room
    ) -> StepDrafts | None:
        """Decide which sequences draft before the next step; None: the step has no such drafts.

        sequences: that may draft. budget: rows of a step. room: how many of the given tokens have KV blocks.
        """
        with self._statistics.deciding():
            return self._decide(sequences, others, budget, room)

    def _decide(self, sequences: Many[Sequence], others: OtherRows, budget: int, room: Room) -> StepDrafts | None:
        count = len(sequences)
        prompts = others.has_prompts
        if self._passes(count, others=others.sequences, prompts=prompts):
            return None
        num_steps = self._pauses.ask(self._state.num_changes)
        batch = self._state.batch(sequences)
        limit = self._limits(batch, _rows_each(budget - count, others, count))
        if limit is None:
            self._pauses.since += 1
            self._pauses.lengthen()
            return None
        if self._looks_first:
            return self._look(batch, limit, others)
        overlap = self._overlap
        wanted = overlap.wants(count + others.sequences, measured=self._policy.name == FASER, prompts=prompts)
        is_due = overlap.is_due(num_steps) and wanted
        if not wanted:
            overlap.stop()
        elif overlap.is_on and not is_due:
            return None
        cached = self._state.cached_decision(count, is_due=is_due)
        if cached is None:
            self._acceptance.learn_held()
        candidates = self._candidates(batch, limit, others, cached)
        if cached is None:
            lengths, self._pauses.since = self._policy.lengths(candidates), 0
        else:
            lengths = np.minimum(cached.lengths.take(batch.slots), limit)
        if is_due:
            overlap.choose(candidates, None if self._policy.name == FASER else lengths)
            if overlap.is_on:
                self._state.expire_decision()
                self._pauses.end()
                return None
        drafts = self._with_room(sequences, candidates, lengths, room)
        if drafts is None:
            return None
        if cached is not None and cached.num_drafting >= len(drafts.lengths):
            drafts.stop = cached.stop
        else:  # a cached rule has too few prices if blocks were short when it was made
            drafts.stop = self._policy.stop_rule(drafts.candidates, drafts.lengths)
        drafts.is_new, drafts.is_drawn = cached is None, not self._is_point_mass
        if cached is None:
            self._state.cache_decision(candidates, lengths, drafts.stop, len(drafts.chosen))
        return drafts

    def drafted(self, step: StepDrafts, answer: Drafts) -> DraftPlan | None:
        """Take in the answer to step.plan. Returns the plan that goes out next; None: all drafts are there."""
        with self._statistics.deciding():
            if not step.plan.from_text:
                step.take(answer)
                return None
            notes = step.is_new and not self._costs.has_passes and not step.looks_first
            row_price = self._row_price if step.looks_first else 0.0
            step.take_text(answer, self._acceptance, notes=notes, row_price=row_price)
            return step.leave_to_model(self._left_to_model(step)) if self._config.needs_passes else None

    def keep(self, step: StepDrafts, sequences: Many[Sequence], room: Room) -> None:
        """The policy says what of the drafts the step verifies. sequences: of step.chosen. room: as in decide."""
        with self._statistics.deciding():
            if step.looks_first:
                self._keep_promising(step, sequences, room)
            else:
                self._keep(step)

    @property
    def can_follow(self) -> bool:
        """Drafts can be decided on before the step in flight has ended: they are a model's alone, and made before
        steps."""
        config = self._config
        return config.needs_draft_model and not config.drafts_from_text and not self.drafts_overlapped

    def settle(self, step: StepDrafts, sequences: Many[Sequence]) -> None:
        """The step has been committed that was in flight at the decision. sequences: those of the drafts."""
        missing_kv = self._state.missing_kv(self._state.batch(sequences))
        found = step.candidates.sequences._replace(missing_kv=missing_kv)
        step.candidates = replace(step.candidates, sequences=found)

    def arrived(self, step: StepDrafts, answer: Drafts) -> None:
        """Drafts that were launched ahead have come, with the step that verified them; `learn` follows."""
        with self._statistics.deciding():
            step.take_unread(answer)
            step.survival = self._acceptance.drafted_survival(step.table)
            self._learn_drafting(step)
            if step.is_new and step.has_drafts:
                self._note(step)

    def chunks(self, sequences: Many[Sequence], others: OtherRows, *, budget: int) -> StepDrafts | None:
        """Choose what the next step verifies of the drafts made during the last one.

        None: nothing. Arguments as in decide.
        """
        if not self.drafts_overlapped:
            return None
        with self._statistics.deciding():
            count = len(sequences)
            batch = self._state.batch(sequences)
            limit = np.minimum(batch.caps, batch.remaining)
            candidates = Candidates(
                DraftingSequences(
                    batch.slots,
                    *self._state.lacking(batch),
                    np.zeros_like(limit),
                    np.full_like(limit, _PLENTY),
                ),
                np.clip(limit, 0, _rows_each(budget - count, others, count)),
                np.ones((count, self.cap + 1)),  # replaced by that of the drafts
                StepFacts(
                    other_rows=others.rows,
                    other_sequences=others.sequences,
                    kv_tokens=batch.kv_tokens,
                    kv_sequences=count,
                ),
            )
            ready, table = self._overlap.ready(candidates)
            if not len(ready):
                return None
            candidates = candidates.take(ready)
            survival, kept = self._overlap.chunks(candidates, table, self._policy)
            return StepDrafts(
                chosen=ready.tolist(),
                lengths=table.lengths,
                candidates=candidates,
                drafts=Drafts(step=0, table=table, run_s=0.0),
                num_decided=1,
                survival=survival,
                kept=kept,
            )

    @property
    def drafts_overlapped(self) -> bool:
        """At present drafts are made concurrently with steps, not before them."""
        return self._overlap.is_on

    def may_overlap(self, plan: StepPlan) -> bool:
        """Drafts may be made concurrently with this step."""
        return self._overlap.takes(plan)

    def decide_overlapped(
        self, sequences: Many[Sequence], num_unverified: Many[int], *, budget: int, room: Room
    ) -> StepDrafts | None:
        """Decide which sequences draft concurrently with the step that is about to run; None: no sequence does.

        sequences: that may draft, with num_unverified draft tokens each in the step. budget, room: as in decide;
        room is asked about those tokens and the new ones together.
        """
        if not self.drafts_overlapped:
            return None
        with self._statistics.deciding():
            batch = self._state.batch(sequences)
            unverified = np.array(num_unverified, dtype=np.int64)
            # The first token of such a draft is no row of the next step: by then it is the bonus token, or wrong.
            limit = np.minimum(np.minimum(batch.caps, self._limit), batch.remaining - unverified)
            lengths = self._overlap.lengths(batch.slots, np.minimum(limit, max(budget // len(sequences), 1)))
            chosen, fitting = self._fitting(sequences, lengths, room, unverified)
            if not len(chosen):
                return None
            slots = batch.slots[chosen]
            self._statistics.launch_overlapped()
            return StepDrafts(
                chosen=chosen.tolist(),
                lengths=fitting,
                candidates=Candidates.alike(slots, fitting, np.ones((len(slots), self.cap + 1))),
                share=self._overlap.share,
            )

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
        guarded = self._guarded(plan, prompts=verified is None)
        overlapped = None
        if guarded is not None and verified is not None:
            overlapped = self._overlap.launched(guarded.num_sequences, guarded.plain_s)
        return StepPrediction(
            predicted_s=predicted_s,
            verified=verified,
            guarded=guarded,
            overlapped=overlapped,
        )

    def _guarded(self, plan: StepPlan, *, prompts: bool) -> GuardedStep | None:
        """Tell the guard that the step begins. None: the guard was not asked about it."""

        def plain_s() -> float:
            rows, computed = plan.rows, 0
            if prompts:
                columns = zip(rows.counts, rows.starts, rows.num_drafts, strict=True)
                computed = sum([(n - 1) * (2 * start + n) for n, start, gamma in columns if not gamma]) // 2
            return self._costs.by_table_s(plan.num_rows - plan.num_drafts, plan.kv_tokens, computed)

        return self._guards.launched(plan, prompts=prompts, plain_s=plain_s)

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
            kind = self._learn(plan, result, sequences, sampled, prediction, drafts, overlapped)
        if self._last is not None and last is not None:
            self._learn_span(self._last, last, admits=bool(plan.started))
        guards = prediction.guarded, prediction.overlapped
        self._last = _LastStep(kind, len(plan.rows), *guards, sum(result.counts))

    def _learn(
        self,
        plan: StepPlan,
        result: StepResult,
        sequences: Many[Sequence],
        sampled: Many[tuple[int, ...]],
        prediction: StepPrediction,
        drafts: StepDrafts | None,
        overlapped: StepDrafts | None,
    ) -> int | None:
        """Return the kind of step that its gap is an example of, as of StepPosterior; None: of none."""
        if result.draft_kv:
            for start, num_held in zip(plan.started, result.draft_kv, strict=True):
                self._state.set_draft_kv(start.slot, num_held)
        running, errors = Status.RUNNING, result.errors
        slots = plan.rows.slots
        if errors or [each.status for each in sequences].count(running) < len(sequences):
            ended = [at in errors or each.status is not running for at, each in enumerate(sequences)]
            slots = [-1 if has_ended else slot for slot, has_ended in zip(slots, ended, strict=True)]
        step = SampledStep(slots, result.counts, result.token_ids)
        predicted_s, device_s = prediction.predicted_s, result.run_s - result.prepared_s
        self._statistics.count_mode()
        self._statistics.pruning = result.pruning
        self._skipped -= 1
        if overlapped is None and self._skipped < 0 and not result.num_cut:
            self._skipped = steps_to_skip(device_s)
            self._costs.observe(Role.STEP, predicted_s, device_s)
            self._statistics.time_step(predicted_s, device_s)
            if prediction.verified is not None:
                self._costs.observe_verification(prediction.verified, device_s, experts=result.experts)
        elif overlapped is not None:
            self._learn_overlapped(plan, result, sampled, overlapped, verify_s=predicted_s)
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
        if overlapped is not None or plan.started or prediction.verified is None:
            return None
        if drafts is None or drafts.num_decided:
            return PLAIN
        return KEPT if plan.num_drafts else DRAFTED

    def _learn_span(self, step: _LastStep, span: StepSpan, *, admits: bool) -> None:
        """The step is over, and so has all that it left to do. admits: sequences were admitted after it."""
        if admits and not (step.guarded is not None and step.guarded.prompts):
            return
        if step.kind is not None and self._times_itself:
            self._costs.posterior.observe_gap(step.num_sequences, span.gap_s, step.kind)
        guard = self._guards.current
        if step.guarded is not None and step.num_tokens and span.seconds > 0 and guard is not None:
            guard.observe(step.guarded, step.num_tokens, span.seconds)
            if step.overlapped is not None:
                self._overlap.observe(step.overlapped, step.num_tokens, span.seconds)

    def trace(self, drafts: StepDrafts | None, slot: int, *, gamma: int, accepted: int) -> StepTrace:
        """Trace the tokens of one sequence in a step that accepted some of its gamma draft tokens."""
        if drafts is None or not gamma:
            return StepTrace()
        at = int(np.flatnonzero(drafts.table.slots == slot)[0])
        drafter = DRAFT_METHODS[drafts.table.methods.item(at)]
        return StepTrace(drafter=drafter, gamma=gamma, accepted=accepted)

    def _limits(self, batch: Batch, rows_each: int) -> Ints | None:
        """Return the maximum number of tokens [S] that each sequence may draft; None: none may draft any."""
        wanted = np.minimum(batch.caps, batch.remaining)
        limit: Ints = np.minimum(wanted, min(self._limit, rows_each))
        if np.count_nonzero(limit > _ZERO) == len(limit):
            return limit
        self._statistics.count_bypassed(REQUEST, wanted <= 0)
        self._statistics.count_bypassed(LOAD, (wanted > 0) & (limit <= 0))
        return np.maximum(limit, 0) if limit.max() > 0 else None

    @property
    def _looks_first(self) -> bool:
        return self._policy.looks_first and self._is_point_mass and not self._overlap.has_lanes

    def _look(self, batch: Batch, limit: Ints, others: OtherRows) -> StepDrafts:
        """All sequences that may draft look up their drafts, and only these decide."""
        count = len(limit)
        self._price_age -= 1
        is_new = self._price_age < 0 or self._priced_for != count
        if is_new:
            self._acceptance.learn_held()
            self._row_price = self._policy.row_price(self._looking(batch, limit, others))
            self._priced_for, self._price_age = count, _PRICED_STEPS - 1
        at, chosen = None, range(count)
        if np.count_nonzero(limit) < count:
            at = limit.nonzero()[0]
        native, texts = self._acceptance.native, self._texts
        if texts is None or not texts.are_all():
            candidates = self._looking(batch, limit, others, at)
            places = chosen if at is None else at.tolist()
            return StepDrafts(
                chosen=places, lengths=candidates.limit, candidates=candidates, looks_first=True, is_new=is_new
            )
        slots, lengths = (batch.slots, limit) if at is None else (batch.slots[at], limit[at])
        began_s = time.perf_counter()
        columns, survival, num_promising = native.look(texts, slots, lengths, self._row_price)
        run_s = time.perf_counter() - began_s
        candidates = _NO_CANDIDATES
        if num_promising or self._state.have_targets:
            candidates = self._looking(batch, limit, others, at)
        if is_new:
            self._time_look_up(run_s, len(lengths))
        return StepDrafts(
            chosen=chosen if at is None else at.tolist(),
            lengths=lengths,
            candidates=candidates,
            looks_first=True,
            drafts=Drafts(step=0, table=DraftTable(*columns), run_s=run_s, began_s=began_s),
            survival=survival,
            kept=np.zeros(len(lengths), dtype=np.int64),
            is_looked=True,
            is_decided=candidates is _NO_CANDIDATES,
        )

    def _looking(self, batch: Batch, limit: Ints, others: OtherRows, at: Ints | None = None) -> Candidates:
        """The sequences of a batch before their drafts are there. at: positions of those to take; None: all."""
        sequences = DraftingSequences(batch.slots, *self._state.lacking(batch), batch.remaining, batch.remaining)
        facts = StepFacts(
            other_rows=others.rows,
            other_sequences=others.sequences,
            kv_tokens=batch.kv_tokens,
            kv_sequences=len(limit),
        )
        candidates = Candidates(sequences, limit, self._unknown[: len(limit)], facts)
        return candidates if at is None else candidates.take(at)

    def _keep_promising(self, step: StepDrafts, sequences: Many[Sequence], room: Room) -> None:
        """Keep nothing of drafts that cannot be worth a row by the last price; the policy cuts the others.

        Sequences with targets may need tokens at any price.
        """
        table, candidates = step.table, step.candidates
        if not step.is_looked:
            self._time_look_up(step.drafts.run_s, len(step.lengths))
            step.kept = np.zeros_like(table.lengths)
        may_pay = step.survival[:, 1] > self._row_price
        if np.count_nonzero(candidates.sequences.wanted_per_s):
            may_pay |= candidates.sequences.wanted_per_s > 0
        may_pay &= table.lengths > 0
        at = may_pay.nonzero()[0]
        if not len(at):
            return
        lengths = table.lengths[at]
        drafted = candidates.take(at).drafted(lengths, step.survival[at], after_s=step.drafts.run_s)
        kept = self._policy.keep(drafted, lengths)
        places = kept.nonzero()[0]
        if not len(places):
            return
        at, wanted = at[places], kept[places].tolist()
        fitting = np.array(room([sequences[i] for i in at.tolist()], wanted), dtype=np.int64)
        self._statistics.count_bypassed(MEMORY, fitting <= 0)
        step.kept[at] = fitting

    def _candidates(
        self, batch: Batch, limit: Ints, others: OtherRows, cached: CachedDecision | None
    ) -> Candidates:
        """Return the policy's input. A cached decision keeps the survival that it was made with.

        Nothing asks for the survival of drafts from text before they are there, except a new decision.
        """
        slots, self._pauses.since = batch.slots, self._pauses.since + 1
        if cached is None:
            survival = self._acceptance.survival(slots, by_model=self._costs.has_passes)
        elif self._costs.has_passes:
            survival = cached.survival.take(slots, axis=0)
        else:
            survival = self._unknown[: len(slots)]
        return Candidates(
            DraftingSequences(
                slots,
                *self._state.lacking(batch),
                self._state.missing_kv(batch),
                self._state.expected_tokens(batch),
            ),
            limit,
            survival,
            StepFacts(
                other_rows=others.rows,
                other_sequences=others.sequences,
                kv_tokens=batch.kv_tokens,
                kv_sequences=len(slots),
                since=self._pauses.since,
            ),
        )

    def _with_room(
        self, sequences: Many[Sequence], candidates: Candidates, lengths: Ints, room: Room
    ) -> StepDrafts | None:
        """Return the drafts of those sequences that have KV blocks for them; None: no sequence drafts."""
        count, num_wanted = len(sequences), np.count_nonzero(lengths)
        wanted = lengths.tolist()
        if num_wanted == count and room([*sequences], wanted) == wanted:
            self._pauses.end()
            return StepDrafts(chosen=range(count), candidates=candidates, lengths=lengths)
        self._statistics.count_bypassed(GAIN, (lengths <= 0) & (candidates.limit > 0))
        chosen, fitting = self._fitting(sequences, lengths, room, np.zeros_like(lengths))
        if not len(chosen):
            self._pauses.lengthen()
            return None
        self._pauses.end()
        drafting = candidates if len(chosen) == count else candidates.take(chosen)
        return StepDrafts(chosen=chosen.tolist(), candidates=drafting, lengths=fitting)

    def _fitting(
        self, sequences: Many[Sequence], lengths: Ints, room: Room, unverified: Ints
    ) -> tuple[Ints, Ints]:
        """Positions of the sequences with KV blocks for their drafts, and how many tokens fit: [N] each.

        unverified: [S] tokens before the draft that need blocks as well.
        """
        chosen = lengths.nonzero()[0]
        before = unverified[chosen]
        num_tokens = (lengths[chosen] + before).tolist()
        fitting = np.array(room([sequences[i] for i in chosen.tolist()], num_tokens), dtype=np.int64)
        fitting -= before
        self._statistics.count_bypassed(MEMORY, fitting <= 0)
        fits = fitting > 0
        return chosen[fits], fitting[fits]

    def _left_to_model(self, step: StepDrafts) -> Ints:
        """Return the tokens [S] that the model drafts in place of a sequence's draft from text."""
        slots, table = step.candidates.slots, step.table
        limit = np.minimum(step.lengths, self._model_cap)
        survival = self._acceptance.survival(slots, by_model=True)
        if step.share:  # the model drafts during a step, so its passes cost the step nothing
            by_model = np.add.reduce(survival[:, 1:], axis=1)
            return np.where(by_model > np.add.reduce(step.survival[:, 1:], axis=1), limit, 0)
        candidates = step.candidates.drafted(limit, survival)
        self._acceptance.note_drafts(slots, step.lengths, table.lengths, step.survival, by_model=False)
        lengths = self._policy.model_lengths(candidates, candidates.drafted(table.lengths, step.survival))
        drafting = lengths.nonzero()[0]
        step.stop = None
        if len(drafting):
            step.stop = self._policy.stop_rule(candidates.take(drafting), lengths[drafting])
            step.lengths = np.where(lengths > 0, lengths, step.lengths)
        return lengths

    def _keep(self, step: StepDrafts) -> None:
        table, has_passes = step.table, self._costs.has_passes
        is_chosen = len(step.taken) > 0 and not len(step.by_model)
        if not is_chosen:
            step.survival = self._acceptance.drafted_survival(table)
        self._learn_drafting(step)
        if step.is_new and (step.has_drafts if has_passes else not is_chosen):
            self._note(step)
        step.kept = table.lengths
        if self._is_point_mass:
            drafted = step.candidates.drafted(table.lengths, step.survival, after_s=step.drafts.run_s)
            step.kept = self._policy.keep(drafted, table.lengths)

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
            lengths, survival = with_dropped(
                lengths,
                step.lengths[by_model],
                survival,
                passes=step.drafts.passes,
                row_price=step.stop.row_price,
            )
        self._acceptance.note_drafts(slots, lengths, lengths, survival, by_model=True)

    def _time_look_up(self, run_s: float, count: int) -> None:
        """Drafts from text have been looked up for count sequences in run_s."""
        predicted_s = self._costs.text_s(count)
        if Role.TEXT in self._costs.tables:
            self._costs.observe(Role.TEXT, predicted_s, run_s)
        self._statistics.time_drafting(predicted_s, run_s)

    def _learn_drafting(self, step: StepDrafts) -> None:
        """Learn how long drafting took. Afterwards no KV is missing of those that the model drafted for."""
        drafts, lengths, missing_kv = step.drafts, step.table.lengths, step.candidates.sequences.missing_kv
        if not drafts.passes:
            self._time_look_up(drafts.run_s, len(lengths))
            return
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
        if np.count_nonzero(accepted < _ZERO):
            at = (accepted >= _ZERO).nonzero()[0]
            table, survival, kept, accepted = table.take(at), survival[at], kept[at], accepted[at]
            num_cut = None if num_cut is None else num_cut[at]
        if self._costs.has_passes and not step.num_decided:
            self._state.extend_draft_kv(table.slots, (table.methods < FIRST_TEXT) * (accepted + _BONUS))
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
        self,
        drafts: DraftTable,
        by_slot: Mapping[int, tuple[int, ...]],
        unverified: Mapping[int, int],
    ) -> None:
        """A step is done. drafts: from text and made during it, in whose place another draft was taken.

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
            ends = {
                slot: start + count - num_drafts + len(by_slot[slot])
                for slot, start, count, num_drafts in zip(
                    rows.slots, rows.starts, rows.counts, rows.num_drafts, strict=True
                )
            }
            self._state.set_draft_kv(by_model, [ends[slot] for slot in by_model.tolist()])

    def _learn_held(self) -> None:
        """While a cached decision serves further steps, outcomes wait for its end, and for the next price."""
        if not self._looks_first and self._state.decision_expired:
            self._acceptance.learn_held()


def _rows_each(budget: int, others: OtherRows, count: int) -> int:
    """Most draft rows of each of count sequences. Prompts keep what they need, or half of the spare rows."""
    spare = budget - others.sequences
    return max(spare - min(others.rows - others.sequences, spare // 2), 0) // count
