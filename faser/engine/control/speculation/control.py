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

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any

import numpy as np

from faser.config.speculation import AUTO, DRAFT_METHODS, PROMPT_ROWS, SpeculationConfig
from faser.engine.contract.drafts import Drafts
from faser.engine.contract.native_acceptance import MakeNativeAcceptance, Texts
from faser.engine.contract.plan import DrafterCheck, DraftPlan, StepPlan
from faser.engine.control.clock import Clock
from faser.engine.control.sequence import Sequence
from faser.engine.control.speculation.acceptance import Acceptance
from faser.engine.control.speculation.asking import Guards, Pauses
from faser.engine.control.speculation.drafter_watch import DrafterWatch
from faser.engine.control.speculation.learning import Learning
from faser.engine.control.speculation.looks import Looks, Room
from faser.engine.control.speculation.overlap import OFF, OverlapControl, OverlapOptions
from faser.engine.control.speculation.policies import make_policy
from faser.engine.control.speculation.policy import Candidates, OtherRows, Policy
from faser.engine.control.speculation.state import Batch, CachedDecision, SpeculationState
from faser.engine.control.speculation.statistics import GAIN, LOAD, MEMORY, REQUEST, SERIAL, SpeculationStatistics
from faser.engine.control.speculation.step_drafts import StepDrafts
from faser.engine.control.step_cost import CostModel
from faser.errors import ConfigError
from faser.types.answer import SpeculationSummary, StepTrace
from faser.types.arrays import ZERO, Ints
from faser.types.statistics import SpeculationStats

FASER = "faser"  # the policy with an objective that overlapped drafting shares
_PLENTY = 1 << 30  # tokens to be generated yet, where missing KV has no price


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
        self._config, self._costs = config, costs
        self.cap = cap
        self._model_cap = min(config.model_cap, costs.block_tokens or cap)
        self._limit = min(cap, self._model_cap) if costs.in_blocks and not config.drafts_from_text else cap
        self._is_point_mass = config.draft_sample_method != "probabilistic"
        self.in_rounds = config.method == AUTO  # text drafts first, then a model if there is one
        self._acceptance = acceptance or Acceptance(num_slots, cap, make_native)
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
        self._pauses = Pauses()
        self._guards = Guards(enabled=guarded)
        self._guards.use(self._policy.name, is_guarded=self._policy.is_guarded, forget=False)
        shared = self._state, self._acceptance, self._statistics
        self._learning = Learning(costs, *shared, self._guards, self._overlap, times_itself=times_itself)
        self._learning.waits = self._looks_first
        self.launch, self.learn = self._learning.launch, self._learning.learn
        self._looks = Looks(*shared, self._learning, texts, num_slots=num_slots)

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
        self._looks.restart()
        self._learning.waits = self._looks_first
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

    def decide(
        self, sequences: Many[Sequence], others: OtherRows, *, budget: int, room: Room
    ) -> StepDrafts | None:
        """Decide which sequences draft before the next step; None: the step has no such drafts.

        sequences: that may draft. budget: rows of a step. room: how many of the given tokens have KV blocks.
        """
        with self._statistics.deciding():
            count = len(sequences)
            if self._passes(count, others=others.sequences, prompts=others.has_prompts):
                return None
            num_steps = self._pauses.ask(self._state.num_changes)
            batch = self._state.batch(sequences)
            limit = self._limits(batch, others.leave(budget, count))
            if limit is None:
                self._pauses.since += 1
                self._pauses.lengthen()
                return None
            if self._looks_first:
                return self._looks.look(self._policy, sequences, batch, limit, others)
            overlap, is_faser = self._overlap, self._policy.name == FASER
            wanted = overlap.wants(count + others.sequences, measured=is_faser, prompts=others.has_prompts)
            is_due = overlap.is_due(num_steps) and wanted
            if not wanted:
                overlap.stop()
            elif overlap.is_on and not is_due:
                return None
            cached = self._state.cached_decision(count, is_due=is_due)
            candidates, lengths = self._lengths(batch, limit, others, cached)
            if is_due:
                overlap.choose(candidates, None if is_faser else lengths)
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
                self._state.cache_decision(candidates, lengths, drafts.stop, len(drafts.sequences))
            return drafts

    def _lengths(
        self, batch: Batch, limit: Ints, others: OtherRows, cached: CachedDecision | None
    ) -> tuple[Candidates, Ints]:
        """Ask the policy, unless a cached decision serves this step; the candidates, and their lengths [S].

        A cached decision keeps the survival that it was made with.
        """
        slots, self._pauses.since = batch.slots, self._pauses.since + 1
        if cached is None:
            self._acceptance.learn_held()
            survival = self._acceptance.survival(slots, by_model=self._costs.has_passes)
        else:
            survival = cached.survival.take(slots, axis=0)
        candidates = self._state.candidates(
            batch,
            limit,
            survival,
            others,
            missing_kv=self._state.missing_kv(batch),
            expected=self._state.expected_tokens(batch),
            since=self._pauses.since,
        )
        if cached is not None:
            return candidates, np.minimum(cached.lengths.take(slots), limit)
        lengths, self._pauses.since = self._policy.lengths(candidates), 0
        return candidates, lengths

    def passes_over(self, count: int, *, prompts: bool) -> bool:
        """Return whether the next step can be launched before the one in flight has ended: no drafts depend on it.

        count: sequences that decode. prompts: the step computes some. Such a step counts as one for which the
        policy was not asked.
        """
        if self.drafts_overlapped or not count:
            self._guards.note(None, prompts=prompts)
            return not self.drafts_overlapped
        return self._passes(count, others=0, prompts=prompts)

    def _passes(self, count: int, *, others: int, prompts: bool) -> bool:
        """Return whether the policy is not asked about the next step, of count sequences, and count such a step.

        others: further sequences, which may not draft. prompts: the step computes some.
        """
        asks, permission = self._may_ask(count, others=others, prompts=prompts)
        self._guards.note(permission, prompts=prompts)
        if not asks:
            self._note_passed(count, permission)
        return not asks

    def _may_ask(self, count: int, *, others: int, prompts: bool) -> tuple[bool, bool | None]:
        """Return whether the policy is asked about the next step, and the guard's permission; None: not asked."""
        permission = None
        if not self._state.any_may_draft or self._policy.never_drafts:
            return False, permission
        if not self._overlap.is_forced:
            permission = self._guards.allows(count + others, prompts=prompts)
        has_ended = self._pauses.has_ended(count, self._state.num_changes)
        return permission is not False and has_ended, permission

    def _note_passed(self, count: int, permission: bool | None) -> None:
        """A step of count sequences passes without asking the policy."""
        if permission is False:
            self._overlap.stop()
        self._pauses.skip()
        self._statistics.count_bypasses(GAIN if self._state.any_may_draft else REQUEST, count)

    def drafted(self, step: StepDrafts, answer: Drafts) -> DraftPlan | None:
        """Take in the answer to step.plan. Returns the plan that goes out next; None: all drafts are there."""
        with self._statistics.deciding():
            if not step.plan.from_text:
                step.take(answer)
                return None
            notes = step.is_new and not self._costs.has_passes and not step.looks_first
            row_price = self._looks.row_price if step.looks_first else 0.0
            step.take_text(answer, self._acceptance, notes=notes, row_price=row_price)
            return step.leave_to_model(self._left_to_model(step)) if self._config.needs_passes else None

    def keep(self, step: StepDrafts, room: Room) -> None:
        """The policy says what of the drafts the step verifies. room: as in decide."""
        with self._statistics.deciding():
            if step.looks_first:
                self._looks.keep(self._policy, step, room)
                return
            table, has_passes = step.table, self._costs.has_passes
            is_chosen = len(step.taken) > 0 and not len(step.by_model)
            if not is_chosen:
                step.survival = self._acceptance.drafted_survival(table)
            self._learning.drafting(step, notes=step.is_new and (step.has_drafts if has_passes else not is_chosen))
            step.kept = table.lengths
            if self._is_point_mass:
                drafted = step.candidates.drafted(table.lengths, step.survival, after_s=step.drafts.run_s)
                step.kept = self._policy.keep(drafted, table.lengths)

    def arrived(self, step: StepDrafts, answer: Drafts) -> None:
        """Drafts that were launched ahead have come, with the step that verified them; `learn` follows."""
        with self._statistics.deciding():
            step.take_unread(answer)
            step.survival = self._acceptance.drafted_survival(step.table)
            self._learning.drafting(step, notes=step.is_new and step.has_drafts)

    @property
    def can_follow(self) -> bool:
        """Drafts can be decided on before the step in flight has ended: they are a model's alone, and made before
        steps."""
        config = self._config
        return config.needs_draft_model and not config.drafts_from_text and not self.drafts_overlapped

    def settle(self, step: StepDrafts) -> None:
        """The step has been committed that was in flight at the decision."""
        missing_kv = self._state.missing_kv(self._state.batch(step.sequences))
        found = step.candidates.sequences._replace(missing_kv=missing_kv)
        step.candidates = replace(step.candidates, sequences=found)

    def chunks(self, sequences: Many[Sequence], others: OtherRows, *, budget: int) -> StepDrafts | None:
        """Choose what the next step verifies of the drafts made during the last one.

        None: nothing. Arguments as in decide.
        """
        with self._statistics.deciding():
            if not self.drafts_overlapped:
                return None
            count = len(sequences)
            batch = self._state.batch(sequences)
            limit = np.minimum(batch.caps, batch.remaining)
            candidates = self._state.candidates(
                batch,
                np.clip(limit, 0, others.leave(budget, count)),
                np.ones((count, self.cap + 1)),  # replaced by that of the drafts
                others,
                missing_kv=np.zeros_like(limit),
                expected=np.full_like(limit, _PLENTY),
            )
            ready, table = self._overlap.ready(candidates)
            if not len(ready):
                return None
            candidates = candidates.take(ready)
            survival, kept = self._overlap.chunks(candidates, table, self._policy)
            return StepDrafts(
                sequences=[sequences[i] for i in ready.tolist()],
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
        with self._statistics.deciding():
            if not self.drafts_overlapped:
                return None
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
                sequences=[sequences[i] for i in chosen.tolist()],
                lengths=fitting,
                candidates=Candidates.alike(slots, fitting, np.ones((len(slots), self.cap + 1))),
                share=self._overlap.share,
            )

    # What both use.

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
        if np.count_nonzero(limit > ZERO) == len(limit):
            return limit
        self._statistics.count_bypassed(REQUEST, wanted <= 0)
        self._statistics.count_bypassed(LOAD, (wanted > 0) & (limit <= 0))
        return np.maximum(limit, 0) if limit.max() > 0 else None

    @property
    def _looks_first(self) -> bool:
        return self._policy.looks_first and self._is_point_mass and not self._overlap.has_lanes

    def _with_room(
        self, sequences: Many[Sequence], candidates: Candidates, lengths: Ints, room: Room
    ) -> StepDrafts | None:
        """Return the drafts of those sequences that have KV blocks for them; None: no sequence drafts."""
        count, num_wanted = len(sequences), np.count_nonzero(lengths)
        wanted = lengths.tolist()
        if num_wanted == count and room([*sequences], wanted) == wanted:
            self._pauses.end()
            return StepDrafts(sequences=[*sequences], candidates=candidates, lengths=lengths)
        self._statistics.count_bypassed(GAIN, (lengths <= 0) & (candidates.limit > 0))
        chosen, fitting = self._fitting(sequences, lengths, room, np.zeros_like(lengths))
        if not len(chosen):
            self._pauses.lengthen()
            return None
        self._pauses.end()
        drafting = candidates if len(chosen) == count else candidates.take(chosen)
        fits = [sequences[i] for i in chosen.tolist()]
        return StepDrafts(sequences=fits, candidates=drafting, lengths=fitting)

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
            by_model = survival[:, 1:].sum(axis=1)
            return np.where(by_model > step.survival[:, 1:].sum(axis=1), limit, 0)
        candidates = step.candidates.drafted(limit, survival)
        self._acceptance.note_drafts(slots, step.lengths, table.lengths, step.survival, by_model=False)
        lengths = self._policy.model_lengths(candidates, candidates.drafted(table.lengths, step.survival))
        drafting = lengths.nonzero()[0]
        step.stop = None
        if len(drafting):
            step.stop = self._policy.stop_rule(candidates.take(drafting), lengths[drafting])
            step.lengths = np.where(lengths > 0, lengths, step.lengths)
        return lengths
