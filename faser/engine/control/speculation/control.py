"""Speculation's place in the scheduler: builds what a policy looks at, takes in what came of its decisions.

Owns the order of a step and nothing that lasts: what is known of sequences is the SequenceStates's, a decision kept for
several steps Standing's, counters the RequestStatistics's and the StepStatistics's, drafting ahead the OverlapControl's. Decides
nothing itself: that is the policy's, whose estimates are the Acceptance's and the CostModel's. A step goes through
decision, keep, launch and learn, in this order; a plain one through launch and learn alone. While drafts are made
ahead it is decision, which then wants nothing, chunks, launch, decide_overlapped and learn.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import numpy as np

from faser.config.speculation import AUTO, SpeculationConfig
from faser.engine.contract.interference import InterferenceTable
from faser.engine.contract.plan import DraftPlan, Drafts, StepPlan, StepResult, StopRule
from faser.engine.contract.step_times import Role
from faser.engine.control.sequences.sequence import Sequence, Status
from faser.engine.control.speculation.acceptance.draft_arrays import FIRST_TEXT, MODELS, DraftArrays, DraftReader
from faser.engine.control.speculation.acceptance.estimator import Acceptance
from faser.engine.control.speculation.cached_decision import CachedDecision, DecisionCache
from faser.engine.control.speculation.cut_drafts import cut_drafts
from faser.engine.control.speculation.drafter_selection import DrafterSelection
from faser.engine.control.speculation.overlap.control import OFF, OverlapControl
from faser.engine.control.speculation.policies import make_policy
from faser.engine.control.speculation.policies.policy import Candidates, Ints, Policy
from faser.engine.control.speculation.request_statistics import RequestStatistics
from faser.engine.control.speculation.state import Batch, SequenceStates
from faser.engine.control.speculation.step_statistics import GAIN, LOAD, MEMORY, REQUEST, SERIAL, StepStatistics
from faser.engine.control.timing.clock import Clock
from faser.engine.control.timing.cost_model import CostModel
from faser.errors import ConfigError
from faser.types import PruneStats, SpeculationStats, SpeculationSummary

_MOST_STEPS_RESTED = 4  # while nobody drafts the policy is asked in every fifth step at least
FASER = "faser"  # the policy that has an objective of its own
_OWN = np.array(1)  # token of the target, beside the accepted ones
_ZERO = np.array(0)

Room = Callable[[list[Sequence], list[int]], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftDecision:
    """Who is to draft: positions among the candidates, and the most tokens of each, at least 1."""

    chosen: tuple[int, ...]
    lengths: tuple[int, ...]
    stop: StopRule | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapDecision:
    """Who is to draft beside a step: chosen as in Wish; slots, lengths: [N]. share: of the processors."""

    chosen: tuple[int, ...]
    slots: Ints
    lengths: Ints
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapOptions:
    """That drafts may be made ahead, on a partition of this name. lanes: what that costs, by share.

    mode: auto, on, or off until somebody wants it otherwise. every: steps between two judgements.
    fallback: why the partition is not the one that was asked for; empty: it is.
    """

    name: str
    lanes: tuple[InterferenceTable, ...]
    mode: str = "auto"
    every: int = 32
    fallback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRows:
    """What a step has beside the sequences that may draft: rows, and how many sequences among them get a token."""

    rows: int
    sequences: int


@dataclass(slots=True, kw_only=True)
class _Asked:
    """What was asked for before drafting. candidates: those that draft; lengths: [S]."""

    candidates: Candidates
    lengths: Ints


class SpeculationControl:
    """One for an engine that has a drafter. policy: None is the one that config names.

    details: the summaries of requests list the verdict on every draft. overlap: None never drafts ahead.
    selection: chooses the drafter of each sequence; None where the engine has one drafter. times_itself: the time that deciding takes is among the costs of drafting; not where time is simulated.
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
        selection: DrafterSelection | None = None,
        times_itself: bool = True,
    ) -> None:
        self._config = config
        self._cap = self._limit = config.cap
        self._costs = costs
        self._point_mass = config.draft_sample_method != "probabilistic"
        self._acceptance = _acceptance_of(config, num_slots)
        self._policy = policy or make_policy(config, costs, self._acceptance)
        self._ahead: OverlapControl | None = None
        if overlap is not None:
            self._ahead = OverlapControl(
                costs,
                self._acceptance,
                overlap.lanes,
                mode=overlap.mode,
                every=overlap.every,
                cap=config.cap,
                num_slots=num_slots,
            )
        self._roster = SequenceStates(num_slots, config.cap, clock)
        self._standing = DecisionCache(self._acceptance, num_slots, config.cap, looks=not costs.has_passes)
        self._tally = RequestStatistics(num_slots, config.cap, (*config.classes,), details=details)
        partition = SERIAL if overlap is None else overlap.name
        self._partition, self._fallback = partition, "" if overlap is None else overlap.fallback
        self._journal = StepStatistics(costs, partition, times_itself=times_itself)
        self._reader = DraftReader(config.cap)
        self._selection = selection
        self._asked: _Asked | None = None
        self._drafted: DraftArrays | None = None
        self._pruning: PruneStats | None = None  # what the data plane last said of it
        self._rest = self._rested = 0  # steps for which the policy is not asked, and was not

    def use_policy(
        self, name: str, gamma: int | None = None, *, forget: bool = True, overlap: str | None = None
    ) -> None:
        """From the next step on another policy decides. gamma: of `fixed`, or another policy's cap.

        forget: what was learned about acceptance is dropped, of running sequences too. overlap: as in the setting
        spec_overlap; None as configured. Raises ConfigError for a policy that there is not, a gamma beyond the
        engine's own, and for an overlap without lanes.
        """
        if gamma is not None and not 1 <= gamma <= self._cap:
            raise ConfigError(f"gamma is {gamma}; this engine drafts at least 1 and at most {self._cap} tokens")
        if overlap not in (None, OFF) and self._ahead is None:
            raise ConfigError(f"overlap is {overlap}; this engine has no lanes to draft ahead on")
        self._standing.drop()
        wanted = replace(self._config, policy=name, num_speculative_tokens=gamma or self._cap)
        if forget:
            self._acceptance.forget()
        self._policy = make_policy(wanted, self._costs, self._acceptance)
        self._rest = self._rested = 0
        if self._ahead is not None:
            self._ahead.reset(overlap)
        self._limit = gamma or self._cap

    @property
    def drafts_overlapped(self) -> bool:
        """Drafts are made beside steps, not before them, until it is judged otherwise."""
        return self._ahead is not None and self._ahead.lanes is not None

    @property
    def is_judging(self) -> bool:
        """The step that is being made verifies drafts, or may have some made beside it."""
        return self._asked is not None or self._drafted is not None or self.drafts_overlapped

    def start(self, sequence: Sequence) -> None:
        """It takes over its slot with the tokens it has."""
        slot = sequence.held_slot
        self._roster.start(sequence)
        self._standing.start(slot)
        self._acceptance.start(slot)
        if self._ahead is not None:
            self._ahead.start(slot)
        self._tally.start(slot, sequence.request.speculation.class_name)

    def release(self, sequence: Sequence) -> None:
        """It leaves its slot, for good or until it is admitted again."""
        slot = sequence.held_slot
        self._roster.release(sequence)
        self._standing.release(slot)
        sequence.speculated = self.summary(sequence)
        self._tally.release(slot)
        self._acceptance.release(slot)
        if self._ahead is not None:
            self._ahead.release(slot)

    def summary(self, sequence: Sequence) -> SpeculationSummary:
        """What speculation has done so far for a sequence that has a slot."""
        return self._tally.summary(sequence.held_slot, sequence.speculated, self._policy.name)

    def decide(
        self, sequences: Many[Sequence], beside: OtherRows, *, budget: int, room: Room
    ) -> DraftDecision | None:
        """What to ask the drafter for; None: nothing, the step is a plain one.

        sequences: that may draft. budget: rows of a step. room: what the KV blocks allow of given lengths.
        """
        began = time.perf_counter()
        decision = self._decide(sequences, beside, budget, room)
        self._journal.decided(time.perf_counter() - began)
        return decision

    def first_round(self, plan: DraftPlan) -> DraftPlan:
        """What to send for these requests first: the plan itself, or one for the text look-up."""
        return plan if self._selection is None else self._selection.first_round(plan)

    def drafted(self, drafts: Drafts) -> Drafts | DraftPlan:
        """The drafts of all requests, or the plan for the requests that are left to the draft model."""
        if self._selection is None:
            return drafts
        began = time.perf_counter()
        answer = self._selection.drafted(drafts)
        self._journal.decided(time.perf_counter() - began)
        return answer

    def keep(self, drafts: Drafts) -> list[tuple[int, ...]]:
        """The drafted tokens to verify, in the order of the requests."""
        began = time.perf_counter()
        kept = self._keep(drafts)
        self._journal.decided(time.perf_counter() - began)
        return kept

    def chunks(self, sequences: Many[Sequence], beside: OtherRows, *, budget: int) -> list[tuple[int, ...]]:
        """What the next step verifies of the drafts made beside the last one, in the order of sequences.

        Arguments as in decision.
        """
        if self._ahead is None or self._ahead.lanes is None:
            return [()] * len(sequences)
        began = time.perf_counter()
        count = len(sequences)
        batch = self._roster.batch(sequences)
        limit = np.minimum(batch.caps, batch.left)
        found, self._drafted = self._ahead.chunks(
            Candidates(
                slots=batch.slots,
                limit=np.clip(limit, 0, _rows_each(budget - count, beside, count)),
                survival=np.ones((count, self._cap + 1)),  # the drafts' own takes its place
                weight=self._roster.weights(batch),
                lag=np.zeros_like(limit),
                other_rows=beside.rows,
                other_sequences=beside.sequences,
                kv_tokens=batch.kv_tokens,
            ),
            self._policy,
        )
        self._journal.decided(time.perf_counter() - began)
        return found

    def decide_overlapped(
        self, sequences: Many[Sequence], num_behind: Many[int], *, budget: int, room: Room
    ) -> OverlapDecision | None:
        """Who is to draft beside the step that is about to run; None: nobody.

        sequences: that may draft, with so many drafted tokens in the step. budget, room: as in decision; room is asked
        about those tokens and the new ones together.
        """
        if self._ahead is None or self._ahead.lanes is None:
            return None
        began = time.perf_counter()
        batch = self._roster.batch(sequences)
        behind = np.array(num_behind, dtype=np.int64)
        # The first token of a draft is no row of the next step, as it is the target's own by then, or wrong.
        limit = np.minimum(np.minimum(batch.caps, self._limit), batch.left - behind)
        lengths = self._ahead.wished(batch.slots, np.minimum(limit, max(budget // len(sequences), 1)))
        chosen = lengths.nonzero()[0]
        total = (lengths + behind)[chosen].tolist()
        fitting = np.array(room([sequences[i] for i in chosen.tolist()], total), dtype=np.int64) - behind[chosen]
        self._journal.bypassed(MEMORY, fitting <= 0)
        chosen, fitting = chosen[fitting > 0], fitting[fitting > 0]
        decision = None
        if len(chosen):
            decision = OverlapDecision(
                chosen=tuple(chosen.tolist()),
                slots=batch.slots[chosen],
                lengths=fitting,
                share=self._ahead.lanes.share,
            )
        self._journal.decided(time.perf_counter() - began)
        return decision

    def rests(self, count: int) -> bool:
        """Whether the next step of count sequences is a plain one, whatever the one in flight brings.

        If so it counts as one for which the policy was not asked.
        """
        if self._rested >= self._rest or self.drafts_overlapped:
            return False
        self._rested += 1
        self._journal.bypasses(GAIN, count)
        return True

    def launch(self, plan: StepPlan) -> None:
        """The step is about to run."""
        if self._selection is not None:
            self._selection.release(plan.released)
        kv_tokens = sum([rows.start for rows in plan.rows])
        predicted_s = float(self._costs.step_s(plan.num_rows, kv_tokens))
        self._journal.launched(predicted_s, drafts=any(rows.num_drafts for rows in plan.rows))

    def learn(
        self, plan: StepPlan, result: StepResult, sequences: Many[Sequence], beside: Drafts | None = None
    ) -> None:
        """Take in what the step brought, before its tokens are committed.

        sequences: of plan.rows, in their order; those that have ended meanwhile teach nothing. beside: what was
        drafted meanwhile.
        """
        began = time.perf_counter()
        if self._selection is not None:
            self._selection.learn(result)
        self._pruning = result.pruning
        if result.saved_s:
            self._journal.shortened(result.saved_s)
        self._journal.stepped(result.run_s, beside=beside is not None)
        if beside is not None:
            self._learn_ahead(plan, result, beside)
        if self._drafted is None:
            running = Status.RUNNING
            slots = [
                rows.slot
                for rows, sequence in zip(plan.rows, sequences, strict=True)
                if rows.samples and sequence.status is running
            ]
            self._tally.plain(np.array(slots, dtype=np.int64))
        else:
            self._learn_drafted(self._drafted, plan, result, sequences)
        drafted = self._asked is not None or beside is not None
        self._asked = self._drafted = None
        self._journal.decided(time.perf_counter() - began)
        self._journal.closes(drafted=drafted)

    def stats(self) -> SpeculationStats:
        tally = replace(self._tally.stats(self._policy.name, self._config.method), pruning=self._pruning)
        ahead = self._ahead
        if ahead is None:
            return self._journal.stats(tally, ())
        lanes = (ahead.cycle.stats("step"), ahead.verify_lane.stats("verify"), ahead.draft_lane.stats("draft"))
        return replace(
            self._journal.stats(tally, lanes),
            draft_share=0.0 if ahead.lanes is None else ahead.lanes.share,
            overlap_s=ahead.overlap_s,
            partition=self._partition,
            partition_fallback=self._fallback,
        )

    def overlap_sent(self, decision: OverlapDecision, behind: tuple[tuple[int, ...], ...]) -> None:
        """The wished drafts are being made, behind these tokens, in the order of the decision."""
        assert self._ahead is not None
        self._journal.drafts_beside()
        self._ahead.sent(decision.slots, decision.lengths, behind)

    def _learn_ahead(self, plan: StepPlan, result: StepResult, beside: Drafts) -> None:
        """Verdicts at the border; a draft model's cache has everything up to the end of what came."""
        assert self._ahead is not None
        self._journal.catchup_tokens += beside.catchup_tokens
        learned = self._ahead.learn(result, beside, verify_s=self._journal.predicted_s)
        self._tally.dropped(learned.slots, learned.methods, learned.dropped)
        if len(learned.verdicts.slots):
            self._standing.collect(learned.verdicts)
        by_model = learned.slots[learned.methods < FIRST_TEXT]
        if len(by_model):
            ends = {
                rows.slot: rows.start + len(rows.token_ids) - rows.num_drafts + len(outcome.token_ids)
                for rows, outcome in zip(plan.rows, result.sequences, strict=True)
            }
            self._roster.covers_upto(by_model, [ends[slot] for slot in by_model.tolist()])

    def _decide(
        self, sequences: Many[Sequence], beside: OtherRows, budget: int, room: Room
    ) -> DraftDecision | None:
        count = len(sequences)
        if self._rested < self._rest:
            self._rested += 1
            self._journal.bypasses(GAIN, count)
            return None
        batch = self._roster.batch(sequences)
        limit = self._limits(batch, _rows_each(budget - count, beside, count))
        if limit is None:
            return None
        is_due = self._ahead is not None and self._ahead.is_due()
        if self.drafts_overlapped and not is_due:
            return None
        standing = self._standing.next(count, is_due=is_due)
        candidates = self._candidates(batch, limit, beside, standing)
        if standing is None:
            lengths = self._policy.lengths(candidates)
        else:
            lengths = np.minimum(standing.lengths.take(batch.slots), limit)
        if self._ahead is not None and is_due:
            self._ahead.judge(candidates, None if self._policy.name == FASER else lengths)
            if self.drafts_overlapped:
                self._standing.rest()
                return None
        asked = self._fitting(sequences, candidates, lengths, room)
        if asked is None:
            return None
        chosen, self._asked = asked
        stop = self._stop_rule(standing, self._asked)
        if standing is None:
            self._standing.keep(candidates, lengths, stop, len(chosen))
        return DraftDecision(chosen=tuple(chosen), lengths=tuple(self._asked.lengths.tolist()), stop=stop)

    def _limits(self, batch: Batch, rows_each: int) -> Ints | None:
        """[S] most tokens that each may draft; None: nobody any."""
        wanted = np.minimum(batch.caps, batch.left)
        limit: Ints = np.minimum(wanted, min(self._limit, rows_each))
        if np.count_nonzero(limit > _ZERO) == len(limit):
            return limit
        self._journal.bypassed(REQUEST, wanted <= 0)
        self._journal.bypassed(LOAD, (wanted > 0) & (limit <= 0))
        return np.maximum(limit, 0) if limit.max() > 0 else None

    def _candidates(
        self, batch: Batch, limit: Ints, beside: OtherRows, standing: CachedDecision | None
    ) -> Candidates:
        """What the policy is to look at. Their survival is the standing one where there is one."""
        slots, since, self._rested = batch.slots, 1 + self._rested, 0
        return Candidates(
            slots=slots,
            limit=limit,
            survival=self._acceptance.survival(slots, self._cap)
            if standing is None
            else standing.survival.take(slots, axis=0),
            weight=self._roster.weights(batch),
            lag=self._roster.lag(batch),
            left=self._roster.expected(batch),
            other_rows=beside.rows,
            other_sequences=beside.sequences,
            kv_tokens=batch.kv_tokens,
            since=since,
        )

    def _fitting(
        self, sequences: Many[Sequence], candidates: Candidates, lengths: Ints, room: Room
    ) -> tuple[Many[int], _Asked] | None:
        """Who of those with a length has blocks to draft, at which positions, and how far; None: nobody."""
        count, num_wanted = len(sequences), np.count_nonzero(lengths)
        self._rest = 0 if num_wanted else min(self._rest + 1, _MOST_STEPS_RESTED)
        wanted = lengths.tolist()
        if num_wanted == count and room([*sequences], wanted) == wanted:
            return range(count), _Asked(candidates=candidates, lengths=lengths)
        self._journal.bypassed(GAIN, (lengths <= 0) & (candidates.limit > 0))
        chosen = lengths.nonzero()[0]
        fitting = np.array(room([sequences[i] for i in chosen.tolist()], lengths[chosen].tolist()), dtype=np.int64)
        self._journal.bypassed(MEMORY, fitting == 0)
        chosen, fitting = chosen[fitting > 0], fitting[fitting > 0]
        if not len(chosen):
            return None
        drafting = candidates if len(chosen) == count else candidates.among(chosen)
        return chosen.tolist(), _Asked(candidates=drafting, lengths=fitting)

    def _stop_rule(self, standing: CachedDecision | None, asked: _Asked) -> StopRule | None:
        """The standing one, unless it has no prices for so many: blocks were short when it was made."""
        if standing is not None and standing.num_drafting >= len(asked.lengths):
            return standing.stop
        return self._policy.stop_rule(asked.candidates, asked.lengths)

    def _keep(self, drafts: Drafts) -> list[tuple[int, ...]]:
        assert self._asked is not None, "drafts come exactly when they were asked for"
        candidates = self._asked.candidates
        methods, lengths, confidences = self._reader.read(drafts.drafts)
        self._note_drafting(drafts, candidates, methods, lengths)
        self._acceptance.offered(candidates.slots, self._asked.lengths, lengths)
        num_came = np.count_nonzero(lengths)
        if not drafts.passes and not num_came:
            if self._point_mass:
                self._policy.keep(candidates, lengths)  # which tells it what looking up brings
            return [()] * len(lengths)  # the step is a plain one
        survival, kept = candidates.survival, lengths
        if num_came:
            survival = self._acceptance.drafted_survival(candidates.slots, methods, lengths, confidences)
        if self._point_mass:
            kept = self._policy.keep(candidates.drafted(lengths, survival), lengths)
        self._drafted = DraftArrays(
            slots=candidates.slots,
            methods=methods,
            lengths=lengths,
            kept=kept,
            confidences=confidences,
            survival=survival,
        )
        return [each.token_ids[:length] for each, length in zip(drafts.drafts, kept.tolist(), strict=True)]

    def _note_drafting(self, drafts: Drafts, candidates: Candidates, methods: Ints, lengths: Ints) -> None:
        """What drafting took against what it should have taken, and what the draft model has in its cache now."""
        self._journal.catchup_tokens += drafts.catchup_tokens
        by_model = methods < FIRST_TEXT
        modelled = lengths * by_model
        longest = max(modelled.tolist()) if drafts.passes else 0
        if longest:
            # A pass whose tokens were all dropped is not in the lengths.
            predicted_s = self._costs.draft_s(modelled, candidates.lag) * drafts.passes / longest
            self._costs.observe(Role.PASS, predicted_s, drafts.run_s)
        else:
            predicted_s = self._costs.text_s(len(lengths))
            if not drafts.passes and Role.TEXT in self._costs.tables:
                self._costs.observe(Role.TEXT, predicted_s, drafts.run_s)
        self._journal.drafting(predicted_s, drafts.run_s)
        if np.count_nonzero(candidates.lag):
            self._roster.covers(candidates.slots, candidates.lag * by_model)

    def _learn_drafted(
        self, drafted: DraftArrays, plan: StepPlan, result: StepResult, sequences: Many[Sequence]
    ) -> None:
        """A sequence that was preempted since has no rows, one that failed no tokens: neither teaches anything."""
        running = Status.RUNNING
        brought = {
            outcome.slot: len(outcome.token_ids)
            for outcome, sequence in zip(result.sequences, sequences, strict=True)
            if outcome.token_ids and sequence.status is running
        }
        came = np.array([brought.pop(slot, 0) for slot in drafted.slots.tolist()], dtype=np.int64)
        if brought:
            self._tally.plain(np.array([*brought], dtype=np.int64))
        if np.count_nonzero(came) < len(came):
            there = came.nonzero()[0]
            drafted, came = drafted.among(there), came[there]
        if not len(came):
            return
        accepted = came - _OWN
        if not drafted.border:
            self._roster.covers(drafted.slots, (drafted.methods < FIRST_TEXT) * came)
        cut = cut_drafts(drafted.slots, plan, result)
        if cut is not None:
            drafted = replace(drafted, kept=drafted.kept - cut.num_cut)
            self._tally.left(drafted.methods, cut.num_cut)
        outcomes = drafted.outcomes(accepted)
        self._tally.drafted(outcomes, drafted.survival)
        lessons = drafted.outcomes(accepted, border=1) if drafted.border else outcomes
        self._standing.collect(lessons if cut is None else cut.with_first_cut(lessons))


def _rows_each(budget: int, beside: OtherRows, count: int) -> int:
    """Draft rows of each of count sequences at most. Prompts are left what they want, or half of what is there."""
    spare = budget - beside.sequences
    return max(spare - min(beside.rows - beside.sequences, spare // 2), 0) // count


def _acceptance_of(config: SpeculationConfig, num_slots: int) -> Acceptance:
    """With the prior of the drafter that config describes. A model always has a draft, a text not."""
    method = config.method
    if method == AUTO:
        method = "suffix" if config.model is None else "draft_model"
    return Acceptance(num_slots, config.cap, method=method, always_drafts=method in MODELS)
