"""Speculation's place in the scheduler: builds what a policy looks at, takes in what came of its decisions.

Owns the arrays by slot that policies read (caps, classes, targets, what the draft model has seen) and the
counters. Decides nothing itself: that is the policy's, whose estimates are the Acceptance's and the CostModel's.
A step goes through wish, keep, launch and learn, in this order; a plain one through launch and learn alone. While
drafts are made ahead it is wish, which then wants nothing, chunks, launch, wish_ahead and learn.
"""

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from faser.engine.clock import Clock
from faser.engine.co_run import CoRun
from faser.engine.cost_model import CostModel, Ledger, Role
from faser.engine.plan import Drafts, StepPlan, StepResult, StopRule
from faser.engine.sequence import Sequence, Status
from faser.engine.spec.acceptance import Acceptance, Outcomes
from faser.engine.spec.ahead import OFF, AheadControl
from faser.engine.spec.policies import make_policy
from faser.engine.spec.policy import Candidates, Floats, Ints, Policy
from faser.engine.spec.tally import Tally
from faser.errors import ConfigError
from faser.speculation import AUTO, DRAFT_METHODS, SpeculationConfig
from faser.types import RoleStats, SpeculationStats, SpeculationSummary

_METHOD_IDS = {method: i for i, method in enumerate(DRAFT_METHODS)}
_MODELS = ("draft_model", "layer_skip")
_NUM_MODELS = len(_MODELS)  # the models' ids come first
assert DRAFT_METHODS[:_NUM_MODELS] == _MODELS
_SEQUENCES_A_STEP, _MOST_STEPS_KEPT = 16, 4  # a decision for 16 sequences is kept for 2 steps, for 48 for 4
_MOST_STEPS_RESTED = 4  # while nobody drafts the policy is asked in every fifth step at least
_FOLLOW = 0.05  # weight of the newest step in what deciding takes
_MOST_WEIGHT = 8.0  # a sequence that misses its target counts for so many that do not, at most
PLAIN, SERIAL = "plain", "serial"
FASER = "faser"  # the policy that has an objective of its own
REQUEST, MEMORY, LOAD, GAIN = "request", "memory", "load", "gain"
BYPASS_REASONS = (LOAD, GAIN, MEMORY, REQUEST)

Room = Callable[[list[Sequence], list[int]], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Who is to draft: positions among the candidates, and the most tokens of each, at least 1."""

    chosen: tuple[int, ...]
    lengths: tuple[int, ...]
    stop: StopRule | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadWish:
    """Who is to draft beside a step: chosen as in Wish; slots, lengths: [N]. share: of the processors."""

    chosen: tuple[int, ...]
    slots: Ints
    lengths: Ints
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """That drafts may be made ahead, on a partition of this name. lanes: what that costs, by share.

    mode: auto, on, or off until somebody wants it otherwise. every: steps between two judgements.
    """

    name: str
    lanes: tuple[CoRun, ...]
    mode: str = "auto"
    every: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What a step has beside the sequences that may draft: rows, and how many sequences among them get a token."""

    rows: int
    sequences: int


@dataclass(slots=True, kw_only=True)
class _Asked:
    """What was asked for before drafting. candidates: those that draft; lengths: [S]."""

    candidates: Candidates
    lengths: Ints


@dataclass(slots=True, kw_only=True)
class _Standing:
    """A decision that may be kept for the next steps, by slot: survival and lengths as in Candidates and Wish.

    usual: mean length, for who comes later. num_sequences: that it was made for; of num_drafting of them the stop
    rule has prices.
    """

    survival: Floats
    lengths: Ints
    usual: int
    num_sequences: int
    stop: StopRule | None
    num_drafting: int


@dataclass(slots=True, kw_only=True)
class _Drafted:
    """What came back. All [S], in the order of the wishes; confidences: [S, K], survival: [S, K + 1].

    border: 1 for chunks of drafts that were made ahead: their first tokens were accepted a step ago. Those are in
    the confidences, but not in lengths, kept and survival.
    """

    slots: Ints
    methods: Ints
    lengths: Ints
    kept: Ints
    confidences: Floats
    survival: Floats
    border: int = 0


class SpeculationControl:
    """One for an engine that has a drafter. policy: None is the one that config names.

    details: the summaries of requests list the verdict on every draft. overlap: None never drafts ahead.
    times_itself: the time that deciding takes is among the costs of drafting; not where time is simulated.
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
        overlap: Overlap | None = None,
        times_itself: bool = True,
    ) -> None:
        self._config = config
        self._cap = self._limit = config.cap
        self._costs = costs
        self._clock = clock
        self._point_mass = config.draft_sample_method != "probabilistic"
        self._acceptance = _acceptance_of(config, num_slots)
        self._policy = policy or make_policy(config, costs, self._acceptance)
        self._ahead: AheadControl | None = None
        if overlap is not None:
            self._ahead = AheadControl(
                costs,
                self._acceptance,
                overlap.lanes,
                mode=overlap.mode,
                every=overlap.every,
                cap=config.cap,
                num_slots=num_slots,
            )
        self._upto = np.tri(config.cap + 1, config.cap, -1, dtype=np.bool_)  # line n: the first n depths
        self._tally = Tally(num_slots, config.cap, (*config.classes,), details=details)
        self._caps: Ints = np.zeros(num_slots, dtype=np.int64)
        self._ends: Ints = np.zeros(num_slots, dtype=np.int64)  # known tokens from which no draft is of use
        self._covered: Ints = np.zeros(num_slots, dtype=np.int64)  # tokens that a draft model has in its cache
        self._target_s: Floats = np.zeros(num_slots)  # a token; 0: no target
        self._since_s: Floats = np.zeros(num_slots)  # when decoding began
        self._since_tokens: Ints = np.zeros(num_slots, dtype=np.int64)
        self._asked: _Asked | None = None
        self._drafted: _Drafted | None = None
        self._in_flight: list[Sequence] = []
        self._standing: _Standing | None = None
        self._steps_left = 0
        self._lessons: list[Outcomes] = []  # of the steps that the standing decision has been kept for
        self._predicted_s = 0.0
        self._drafting_s = (0.0, 0.0)  # of the step that is being made: predicted, measured
        self._whole = Ledger()
        self._decide_s = 0.0
        self._times_itself = times_itself
        self._decided_s = 0.0  # decide_s before the step that is being made
        self._deciding = [0.0, 0.0]  # host time of a step in which nobody drafts, or somebody, followed
        self._rest = self._rested = 0  # steps for which the policy is not asked, and was not
        self._catchup_tokens = 0
        self._method = config.method
        self._mode = self._next_mode = PLAIN
        self._partition = SERIAL if overlap is None else overlap.name
        self._mode_steps: Counter[str] = Counter(dict.fromkeys((PLAIN, SERIAL, self._partition), 0))
        self._switches: Counter[tuple[str, str]] = Counter()
        self._bypasses: Counter[str] = Counter(dict.fromkeys(BYPASS_REASONS, 0))

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
        self._take_lessons()
        wanted = replace(self._config, policy=name, num_speculative_tokens=gamma or self._cap)
        if forget:
            self._acceptance.forget()
        self._policy = make_policy(wanted, self._costs, self._acceptance)
        self._standing = None
        self._rest = self._rested = 0
        if self._ahead is not None:
            self._ahead.reset(overlap)
        self._limit = gamma or self._cap

    @property
    def drafts_ahead(self) -> bool:
        """Drafts are made beside steps, not before them, until it is judged otherwise."""
        return self._ahead is not None and self._ahead.lanes is not None

    def start(self, sequence: Sequence) -> None:
        """It takes over its slot with the tokens it has."""
        slot, wishes = sequence.held_slot, sequence.request.speculation
        if self._standing is not None:
            self._standing.lengths[slot] = self._standing.usual
        own = self._cap if wishes.max_tokens is None else wishes.max_tokens
        self._ends[slot] = sequence.max_total - 1
        self._caps[slot] = min(own, self._cap) if wishes.enabled else 0
        self._covered[slot] = sequence.num_computed
        self._target_s[slot] = (wishes.slo.tpot_ms or 0.0) / 1000
        self._since_tokens[slot] = 0
        self._acceptance.start(slot)
        if self._ahead is not None:
            self._ahead.start(slot)
        self._tally.start(slot, wishes.class_name)

    def release(self, sequence: Sequence) -> None:
        """It leaves its slot, for good or until it is admitted again."""
        slot = sequence.held_slot
        self._lessons = [each.without(slot) for each in self._lessons]
        sequence.speculated = self.summary(sequence)
        self._tally.release(slot)
        self._acceptance.release(slot)
        if self._ahead is not None:
            self._ahead.release(slot)

    def summary(self, sequence: Sequence) -> SpeculationSummary:
        """What speculation has done so far for a sequence that has a slot."""
        return self._tally.summary(sequence.held_slot, sequence.speculated, self._policy.name)

    def wish(self, sequences: Many[Sequence], beside: Beside, *, budget: int, room: Room) -> Wish | None:
        """What to ask the drafter for; None: nothing, the step is a plain one.

        sequences: that may draft. budget: rows of a step. room: what the KV blocks allow of given lengths.
        """
        began = time.perf_counter()
        wish = self._wish(sequences, beside, budget, room)
        self._decide_s += time.perf_counter() - began
        return wish

    def keep(self, drafts: Drafts) -> list[tuple[int, ...]]:
        """The drafted tokens to verify, in the order of the wishes."""
        began = time.perf_counter()
        kept = self._keep(drafts)
        self._decide_s += time.perf_counter() - began
        return kept

    def chunks(self, sequences: Many[Sequence], beside: Beside, *, budget: int) -> list[tuple[int, ...]]:
        """What the next step verifies of the drafts made beside the last one, in the order of sequences.

        Arguments as in wish.
        """
        if self._ahead is None or self._ahead.lanes is None:
            return [()] * len(sequences)
        began = time.perf_counter()
        count = len(sequences)
        slots = np.array([each.slot for each in sequences], dtype=np.int64)
        known = np.array([each.num_tokens for each in sequences], dtype=np.int64)
        limit = np.minimum(self._caps[slots], self._ends[slots] - known)
        found, verified = self._ahead.chunks(
            Candidates(
                slots=slots,
                limit=np.clip(limit, 0, _rows_each(budget - count, beside, count)),
                survival=np.ones((count, self._cap + 1)),  # the drafts' own takes its place
                weight=self._weights(slots, known),
                lag=np.zeros_like(known),
                other_rows=beside.rows,
                other_sequences=beside.sequences,
                kv_tokens=int(np.add.reduce(known)),
            ),
            self._policy,
        )
        if verified is not None:
            self._drafted = _Drafted(
                slots=verified.slots,
                methods=verified.methods,
                lengths=verified.drafted,
                kept=verified.kept,
                confidences=verified.confidences,
                survival=verified.survival,
                border=1,
            )
        self._decide_s += time.perf_counter() - began
        return found

    def wish_ahead(
        self, sequences: Many[Sequence], num_behind: Many[int], *, budget: int, room: Room
    ) -> AheadWish | None:
        """Who is to draft beside the step that is about to run; None: nobody.

        sequences: that may draft, with so many drafted tokens in the step. budget, room: as in wish; room is asked
        about those tokens and the new ones together.
        """
        if self._ahead is None or self._ahead.lanes is None:
            return None
        began = time.perf_counter()
        slots = np.array([each.slot for each in sequences], dtype=np.int64)
        behind = np.array(num_behind, dtype=np.int64)
        known = np.array([each.num_tokens for each in sequences], dtype=np.int64)
        # The first token of a draft is no row of the next step, as it is the target's own by then, or wrong.
        limit = np.minimum(np.minimum(self._caps[slots], self._limit), self._ends[slots] - known - behind)
        lengths = self._ahead.wished(slots, np.minimum(limit, max(budget // len(sequences), 1)))
        chosen = lengths.nonzero()[0]
        total = (lengths + behind)[chosen].tolist()
        fitting = np.array(room([sequences[i] for i in chosen.tolist()], total), dtype=np.int64) - behind[chosen]
        self._count_bypasses(MEMORY, fitting <= 0)
        chosen, fitting = chosen[fitting > 0], fitting[fitting > 0]
        wish = None
        if len(chosen):
            wish = AheadWish(
                chosen=tuple(chosen.tolist()), slots=slots[chosen], lengths=fitting, share=self._ahead.lanes.share
            )
        self._decide_s += time.perf_counter() - began
        return wish

    def launch(self, plan: StepPlan, sequences: list[Sequence]) -> None:
        """The step is about to run. sequences: of plan.rows, in their order."""
        self._in_flight = sequences
        kv_tokens = sum(rows.start for rows in plan.rows)
        self._predicted_s = float(self._costs.step_s(plan.num_rows, kv_tokens))
        self._next_mode = SERIAL if any(rows.num_drafts for rows in plan.rows) else PLAIN

    def learn(self, plan: StepPlan, result: StepResult, beside: Drafts | None = None) -> None:
        """Take in what the step brought, before its tokens are committed. beside: drafted meanwhile."""
        began = time.perf_counter()
        self._note_mode()
        if beside is None:
            self._costs.observe(Role.STEP, self._predicted_s, result.run_s)
            self._whole.add(self._predicted_s + self._drafting_s[0], result.run_s + self._drafting_s[1])
            self._drafting_s = (0.0, 0.0)
        if beside is not None:
            self._learn_ahead(plan, result, beside)
        if self._drafted is None:
            self._learn_plain(plan)
        else:
            self._learn_drafted(self._drafted, plan, result)
        drafted = self._asked is not None or beside is not None
        self._asked = self._drafted = None
        self._decide_s += time.perf_counter() - began
        if self._times_itself:
            self._note_deciding(drafted)

    def stats(self) -> SpeculationStats:
        return replace(
            self._tally.stats(self._policy.name, self._method),
            mode=self._mode,
            mode_steps=tuple(self._mode_steps.items()),
            switches=tuple((one, other, times) for (one, other), times in self._switches.items()),
            bypasses=tuple(self._bypasses.items()),
            roles=self._roles(),
            decide_s=self._decide_s,
            catchup_tokens=self._catchup_tokens,
            draft_share=self._ahead.lanes.share
            if self._ahead is not None and self._ahead.lanes is not None
            else 0.0,
            overlap_s=0.0 if self._ahead is None else self._ahead.overlap_s,
        )

    def sent_ahead(self, wish: AheadWish, behind: tuple[tuple[int, ...], ...]) -> None:
        """The wished drafts are being made, behind these tokens, in the order of the wish."""
        assert self._ahead is not None
        self._next_mode = self._partition
        self._ahead.sent(wish.slots, wish.lengths, behind, verify_s=self._predicted_s)

    def _learn_ahead(self, plan: StepPlan, result: StepResult, beside: Drafts) -> None:
        """Verdicts at the border; a draft model's cache has everything up to the end of what came."""
        assert self._ahead is not None
        self._catchup_tokens += beside.catchup_tokens
        learned = self._ahead.learn(result, beside)
        self._tally.dropped(learned.slots, learned.methods, learned.dropped)
        if len(learned.verdicts.slots):
            self._collect(learned.verdicts)
        ends = {
            rows.slot: rows.start + len(rows.token_ids) - rows.num_drafts + len(outcome.token_ids)
            for rows, outcome in zip(plan.rows, result.sequences, strict=True)
        }
        for draft in beside.drafts:
            if _METHOD_IDS[draft.method] < _NUM_MODELS:
                self._covered[draft.slot] = ends[draft.slot]

    def _note_deciding(self, drafted: bool) -> None:
        """What this step's deciding took; what it takes longer with drafts than without is a cost of drafts."""
        step_s, self._decided_s = self._decide_s - self._decided_s, self._decide_s
        usual_s = self._deciding[drafted]
        self._deciding[drafted] += (step_s - usual_s) * (_FOLLOW if usual_s else 1.0)
        self._costs.deciding_s = max(self._deciding[True] - self._deciding[False], 0.0)

    def _note_mode(self) -> None:
        self._mode_steps[self._next_mode] += 1
        if self._next_mode != self._mode:
            self._switches[self._mode, self._next_mode] += 1
            self._mode = self._next_mode

    def _wish(self, sequences: Many[Sequence], beside: Beside, budget: int, room: Room) -> Wish | None:
        count = len(sequences)
        if self._rested < self._rest:
            self._rested += 1
            self._bypasses[GAIN] += count
            return None
        slots = np.array([each.slot for each in sequences], dtype=np.int64)
        known = np.array([each.num_tokens for each in sequences], dtype=np.int64)
        limit = self._limits(slots, known, _rows_each(budget - count, beside, count))
        if limit is None:
            return None
        is_due = self._ahead is not None and self._ahead.is_due()
        if self._ahead is not None and self._ahead.lanes is not None and not is_due:
            return None
        standing = self._standing if self._stands(count) and not is_due else None
        if standing is None:
            self._take_lessons()
        candidates = Candidates(
            slots=slots,
            limit=limit,
            survival=self._acceptance.survival(slots, self._cap) if standing is None else standing.survival[slots],
            weight=self._weights(slots, known),
            lag=known - self._covered[slots],
            other_rows=beside.rows,
            other_sequences=beside.sequences,
            kv_tokens=int(np.add.reduce(known)),
            since=1 + self._rested,
        )
        self._rested = 0
        if standing is None:
            lengths = self._policy.lengths(candidates)
        else:
            lengths = np.minimum(standing.lengths[slots], limit)
        if self._ahead is not None and is_due:
            self._ahead.judge(candidates, None if self._policy.name == FASER else lengths)
            if self._ahead.lanes is not None:
                self._standing, self._steps_left = None, 0
                return None
        chosen = lengths.nonzero()[0]
        self._rest = 0 if len(chosen) else min(self._rest + 1, _MOST_STEPS_RESTED)
        if len(chosen) < count:
            self._count_bypasses(GAIN, (lengths <= 0) & (limit > 0))
        asked = self._fitting(sequences, candidates, lengths, chosen, room)
        if asked is None:
            return None
        chosen, self._asked = asked
        stop = self._stop_rule(standing, self._asked)
        if standing is None:
            self._steps_left = min(count // _SEQUENCES_A_STEP, _MOST_STEPS_KEPT - 1)
            self._standing = self._stand(candidates, lengths, stop, len(chosen)) if self._steps_left else None
        return Wish(chosen=tuple(chosen.tolist()), lengths=tuple(self._asked.lengths.tolist()), stop=stop)

    def _limits(self, slots: Ints, known: Ints, rows_each: int) -> Ints | None:
        """[S] most tokens that each may draft; None: nobody any."""
        wanted = np.minimum(self._caps[slots], self._ends[slots] - known)
        limit: Ints = np.minimum(wanted, min(self._limit, rows_each))
        if np.minimum.reduce(limit) > 0:
            return limit
        self._count_bypasses(REQUEST, wanted <= 0)
        self._count_bypasses(LOAD, (wanted > 0) & (limit <= 0))
        return np.maximum(limit, 0) if limit.max() > 0 else None

    def _fitting(
        self, sequences: Many[Sequence], candidates: Candidates, lengths: Ints, chosen: Ints, room: Room
    ) -> tuple[Ints, _Asked] | None:
        """Who of the chosen has blocks to draft, and how far; None: nobody."""
        fitting = np.array(room([sequences[i] for i in chosen.tolist()], lengths[chosen].tolist()), dtype=np.int64)
        if np.count_nonzero(fitting) < len(fitting):
            self._count_bypasses(MEMORY, fitting == 0)
            chosen, fitting = chosen[fitting > 0], fitting[fitting > 0]
        if not len(chosen):
            return None
        drafting = candidates if len(chosen) == len(sequences) else candidates.among(chosen)
        return chosen, _Asked(candidates=drafting, lengths=fitting)

    def _stop_rule(self, standing: _Standing | None, asked: _Asked) -> StopRule | None:
        """The standing one, unless it has no prices for so many: blocks were short when it was made."""
        if standing is not None and standing.num_drafting >= len(asked.lengths):
            return standing.stop
        return self._policy.stop_rule(asked.candidates, asked.lengths)

    def _stands(self, count: int) -> bool:
        """Whether the last decision is kept: for some steps in a large batch, while few come or go.

        There what one step teaches moves little, and every cut is still judged by the drafts' own confidences.
        """
        self._steps_left -= 1
        if self._steps_left < 0 or self._standing is None:
            return False
        return abs(count - self._standing.num_sequences) * _SEQUENCES_A_STEP <= count

    def _stand(self, candidates: Candidates, lengths: Ints, stop: StopRule | None, num_drafting: int) -> _Standing:
        count = candidates.num_sequences
        usual = round(int(np.add.reduce(lengths)) / count)
        by_slot = np.full(len(self._caps), usual, dtype=np.int64)
        by_slot[candidates.slots] = lengths
        survival = np.empty((len(self._caps), self._cap + 1))
        survival[:] = np.add.reduce(candidates.survival, axis=0) / count
        survival[candidates.slots] = candidates.survival
        return _Standing(
            survival=survival,
            lengths=by_slot,
            usual=usual,
            num_sequences=count,
            stop=stop,
            num_drafting=num_drafting,
        )

    def _keep(self, drafts: Drafts) -> list[tuple[int, ...]]:
        assert self._asked is not None, "drafts come exactly when they were asked for"
        candidates = self._asked.candidates
        lengths = np.array([len(each.token_ids) for each in drafts.drafts], dtype=np.int64)
        methods = np.array([_METHOD_IDS[each.method] for each in drafts.drafts], dtype=np.int64)
        confidences = np.zeros((len(lengths), self._cap))
        self._note_drafting(drafts, candidates, methods, lengths)
        self._acceptance.offered(candidates.slots, self._asked.lengths, lengths)
        survival, kept = candidates.survival, lengths
        if np.count_nonzero(lengths):
            confidences[self._upto[lengths]] = [value for each in drafts.drafts for value in each.confidences]
            survival = self._acceptance.drafted_survival(candidates.slots, methods, lengths, confidences)
        if self._point_mass:  # also where nobody had a draft: that tells the policy what looking up brings
            kept = self._policy.keep(candidates.drafted(lengths, survival), lengths)
        self._drafted = _Drafted(
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
        self._catchup_tokens += drafts.catchup_tokens
        by_model = methods < _NUM_MODELS
        modelled = lengths * by_model
        longest = int(np.maximum.reduce(modelled, initial=0))
        if drafts.passes and longest:
            # A pass whose tokens were all dropped is not in the lengths.
            predicted_s = self._costs.draft_s(modelled, candidates.lag) * drafts.passes / longest
            self._costs.observe(Role.PASS, predicted_s, drafts.run_s)
        else:
            predicted_s = self._costs.text_s(len(lengths))
            if not drafts.passes and Role.TEXT in self._costs.tables:
                self._costs.observe(Role.TEXT, predicted_s, drafts.run_s)
        self._drafting_s = (predicted_s, drafts.run_s)
        self._covered[candidates.slots] += candidates.lag * by_model

    def _roles(self) -> tuple[RoleStats, ...]:
        """The target's forward is called verify, as the cost model's role of that name is only part of a step."""
        roles = self._costs.stats()
        verify = [replace(each, role="verify") if each.role == Role.STEP else each for each in roles]
        if self._ahead is None:
            return (self._whole.stats("step"), *verify)
        ahead = self._ahead
        lanes = (ahead.cycle.stats("step"), ahead.verify_lane.stats("verify"), ahead.draft_lane.stats("draft"))
        return (self._whole.stats("step"), *verify, *lanes)

    def _learn_plain(self, plan: StepPlan) -> None:
        slots = np.array([rows.slot for rows in plan.rows if rows.samples], dtype=np.int64)
        self._tally.plain(slots)

    def _learn_drafted(self, drafted: _Drafted, plan: StepPlan, result: StepResult) -> None:
        """A sequence that was preempted since has no rows, one that failed no tokens: neither teaches anything."""
        brought = {
            rows.slot: len(outcome.token_ids)
            for rows, outcome, sequence in zip(plan.rows, result.sequences, self._in_flight, strict=True)
            if rows.samples and outcome.token_ids and sequence.status is Status.RUNNING
        }
        accepted = np.array([brought.pop(slot, 0) for slot in drafted.slots.tolist()], dtype=np.int64) - 1
        if brought:
            self._tally.plain(np.array([*brought], dtype=np.int64))
        if np.minimum.reduce(accepted, initial=0) < 0:
            drafted, accepted = _judged(drafted, accepted)
        if not len(accepted):
            return
        if not drafted.border:
            self._covered[drafted.slots] += (drafted.methods < _NUM_MODELS) * (accepted + 1)
        outcomes = _outcomes(drafted, accepted)
        self._tally.drafted(outcomes, drafted.survival)
        self._collect(_outcomes(drafted, accepted, border=1) if drafted.border else outcomes)

    def _collect(self, outcomes: Outcomes) -> None:
        """While a decision stands its verdicts would change nothing; they are taken in before the next one."""
        self._lessons.append(outcomes)
        if self._steps_left <= 0:
            self._take_lessons()

    def _take_lessons(self) -> None:
        if self._lessons:
            self._acceptance.learn(*self._lessons)
            self._lessons.clear()

    def _weights(self, slots: Ints, known: Ints) -> Floats:
        """1, or how far a sequence lags behind its target of time per token: (measured / target) squared.

        Source: the order of AdaServe (arXiv:2501.12162), first what targets need, then throughput.
        """
        targets = self._target_s[slots]
        if not np.count_nonzero(targets):
            return np.ones(len(slots))
        now = self._clock.now()
        fresh = self._since_tokens[slots] == 0
        self._since_s[slots[fresh]], self._since_tokens[slots[fresh]] = now, known[fresh]
        elapsed, tokens = now - self._since_s[slots], known - self._since_tokens[slots]
        lag = elapsed / np.maximum(tokens * targets, 1e-9)
        return np.where((targets > 0) & (tokens > 0), np.clip(lag * lag, 1.0, _MOST_WEIGHT), 1.0)

    def _count_bypasses(self, reason: str, mask: NDArray[np.bool_]) -> None:
        self._bypasses[reason] += int(np.count_nonzero(mask))


def _rows_each(budget: int, beside: Beside, count: int) -> int:
    """Draft rows of each of count sequences at most. Prompts are left what they want, or half of what is there."""
    spare = budget - beside.sequences
    return max(spare - min(beside.rows - beside.sequences, spare // 2), 0) // count


def _acceptance_of(config: SpeculationConfig, num_slots: int) -> Acceptance:
    """With the prior of the drafter that config describes. A model always has a draft, a text not."""
    method = config.method
    if method == AUTO:
        method = "suffix" if config.model is None else "draft_model"
    return Acceptance(num_slots, config.cap, method=method, always_drafts=method in _MODELS)


def _outcomes(drafted: _Drafted, accepted: Ints, border: int = 0) -> Outcomes:
    """border: 1: of the whole drafts, their first tokens included."""
    return Outcomes(
        slots=drafted.slots,
        methods=drafted.methods,
        drafted=drafted.lengths + border,
        verified=drafted.kept + border,
        accepted=accepted + border,
        confidences=drafted.confidences,
    )


def _judged(drafted: _Drafted, accepted: Ints) -> tuple[_Drafted, Ints]:
    """Those whose drafts were judged, and how many tokens of each were accepted."""
    there = (accepted >= 0).nonzero()[0]
    judged = _Drafted(
        slots=drafted.slots[there],
        methods=drafted.methods[there],
        lengths=drafted.lengths[there],
        kept=drafted.kept[there],
        confidences=drafted.confidences[there],
        survival=drafted.survival[there],
        border=drafted.border,
    )
    return judged, accepted[there]
