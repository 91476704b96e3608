"""Speculation's place in the scheduler: builds what a policy looks at, takes in what came of its decisions.

Owns the arrays by slot that policies read (caps, classes, targets, what the draft model has seen) and the
counters. Decides nothing itself: that is the policy's, whose estimates are the Acceptance's and the CostModel's.
A step goes through wish, keep, launch and learn, in this order; a plain one through launch and learn alone.
"""

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from faser.engine.clock import Clock
from faser.engine.cost_model import CostModel, Ledger, Role
from faser.engine.plan import Drafts, StepPlan, StepResult, StopRule
from faser.engine.sequence import Sequence, Status
from faser.engine.spec.acceptance import Acceptance, Outcomes
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
_MOST_WEIGHT = 8.0  # a sequence that misses its target counts for so many that do not, at most
PLAIN, SERIAL = "plain", "serial"
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
class Beside:
    """What a step has beside the sequences that may draft: rows, and how many sequences among them get a token."""

    rows: int
    sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What was asked for before drafting. candidates: those that draft; lengths: [S]."""

    candidates: Candidates
    lengths: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class _Standing:
    """A decision that may be kept for the next steps. slots: whose; the rest as in Candidates and Wish.

    num_drafting: for so many sequences the stop rule has prices.
    """

    slots: Ints
    survival: Floats
    lengths: Ints
    stop: StopRule | None
    num_drafting: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drafted:
    """What came back. All [S], in the order of the wishes; confidences: [S, K], survival: [S, K + 1]."""

    slots: Ints
    methods: Ints
    lengths: Ints
    kept: Ints
    confidences: Floats
    survival: Floats


class SpeculationControl:
    """One for an engine that has a drafter. policy: None is the one that config names.

    details: the summaries of requests list the verdict on every draft.
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
    ) -> None:
        self._config = config
        self._cap = self._limit = config.cap
        self._costs = costs
        self._clock = clock
        self._point_mass = config.draft_sample_method != "probabilistic"
        self._acceptance = _acceptance_of(config, num_slots)
        self._policy = policy or make_policy(config, costs, self._acceptance)
        self._tally = Tally(num_slots, config.cap, (*config.classes,), details=details)
        self._caps: Ints = np.zeros(num_slots, dtype=np.int64)
        self._covered: Ints = np.zeros(num_slots, dtype=np.int64)  # tokens that a draft model has in its cache
        self._target_s: Floats = np.zeros(num_slots)  # a token; 0: no target
        self._since_s: Floats = np.zeros(num_slots)  # when decoding began
        self._since_tokens: Ints = np.zeros(num_slots, dtype=np.int64)
        self._asked: _Asked | None = None
        self._drafted: _Drafted | None = None
        self._in_flight: list[Sequence] = []
        self._standing: _Standing | None = None
        self._steps_left = 0
        self._predicted_s = 0.0
        self._drafting_s = (0.0, 0.0)  # of the step that is being made: predicted, measured
        self._whole = Ledger()
        self._decide_s = 0.0
        self._catchup_tokens = 0
        self._method = config.method
        self._mode = PLAIN
        self._mode_steps: Counter[str] = Counter({PLAIN: 0, SERIAL: 0})
        self._switches: Counter[tuple[str, str]] = Counter()
        self._bypasses: Counter[str] = Counter(dict.fromkeys(BYPASS_REASONS, 0))

    def use_policy(self, name: str, gamma: int | None = None, *, forget: bool = True) -> None:
        """From the next step on another policy decides. gamma: of `fixed`, or another policy's cap.

        forget: what was learned about acceptance is dropped, of running sequences too.
        Raises ConfigError for a policy that there is not, or a gamma beyond the engine's own.
        """
        if gamma is not None and not 1 <= gamma <= self._cap:
            raise ConfigError(f"gamma is {gamma}; this engine drafts at least 1 and at most {self._cap} tokens")
        wanted = replace(self._config, policy=name, num_speculative_tokens=gamma or self._cap)
        if forget:
            self._acceptance.forget()
        self._policy = make_policy(wanted, self._costs, self._acceptance)
        self._standing = None
        self._limit = gamma or self._cap

    def start(self, sequence: Sequence) -> None:
        """It takes over its slot with the tokens it has."""
        slot, wishes = sequence.held_slot, sequence.request.speculation
        self._standing = None
        own = self._cap if wishes.max_tokens is None else wishes.max_tokens
        self._caps[slot] = min(own, self._cap) if wishes.enabled else 0
        self._covered[slot] = sequence.num_computed
        self._target_s[slot] = (wishes.slo.tpot_ms or 0.0) / 1000
        self._since_tokens[slot] = 0
        self._acceptance.start(slot)
        self._tally.start(slot, wishes.class_name)

    def release(self, sequence: Sequence) -> None:
        """It leaves its slot, for good or until it is admitted again."""
        slot = sequence.held_slot
        sequence.speculated = self.summary(sequence)
        self._tally.release(slot)
        self._acceptance.release(slot)

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

    def launch(self, plan: StepPlan, sequences: list[Sequence]) -> None:
        """The step is about to run. sequences: of plan.rows, in their order."""
        self._in_flight = sequences
        kv_tokens = sum(rows.start for rows in plan.rows)
        self._predicted_s = float(self._costs.step_s(plan.num_rows, kv_tokens))
        mode = SERIAL if any(rows.num_drafts for rows in plan.rows) else PLAIN
        self._mode_steps[mode] += 1
        if mode != self._mode:
            self._switches[self._mode, mode] += 1
            self._mode = mode

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        """Take in what the step brought, before its tokens are committed."""
        began = time.perf_counter()
        self._costs.observe(Role.STEP, self._predicted_s, result.run_s)
        self._whole.add(self._predicted_s + self._drafting_s[0], result.run_s + self._drafting_s[1])
        self._drafting_s = (0.0, 0.0)
        if self._drafted is None:
            self._learn_plain(plan)
        else:
            self._learn_drafted(self._drafted, plan, result)
        self._asked = self._drafted = None
        self._decide_s += time.perf_counter() - began

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
        )

    def _wish(self, sequences: Many[Sequence], beside: Beside, budget: int, room: Room) -> Wish | None:
        count = len(sequences)
        slots = np.fromiter((each.slot for each in sequences), np.int64, count)
        known = np.fromiter((each.num_tokens for each in sequences), np.int64, count)
        left = np.fromiter((each.max_total for each in sequences), np.int64, count) - known - 1
        wanted = np.minimum(np.minimum(self._caps[slots], left), self._limit)
        limit = np.minimum(wanted, _rows_each(budget - count, beside, count))
        self._count_bypasses(REQUEST, wanted <= 0)
        self._count_bypasses(LOAD, (wanted > 0) & (limit <= 0))
        if not (limit > 0).any():
            return None
        standing = self._standing if self._stands(slots) else None
        candidates = Candidates(
            slots=slots,
            limit=np.maximum(limit, 0),
            survival=self._acceptance.survival(slots, self._cap) if standing is None else standing.survival,
            weight=self._weights(slots, known),
            lag=known - self._covered[slots],
            other_rows=beside.rows,
            other_sequences=beside.sequences,
            kv_tokens=int(known.sum()),
        )
        if standing is None:
            lengths = self._policy.lengths(candidates)
        else:
            lengths = np.minimum(standing.lengths, candidates.limit)
        self._count_bypasses(GAIN, (lengths <= 0) & (candidates.limit > 0))
        chosen = lengths.nonzero()[0]
        fitting = np.array(room([sequences[i] for i in chosen.tolist()], lengths[chosen].tolist()), dtype=np.int64)
        self._count_bypasses(MEMORY, fitting <= 0)
        chosen, fitting = chosen[fitting > 0], fitting[fitting > 0]
        if not len(chosen):
            return None
        drafting = _subset(candidates, chosen)
        self._asked = _Asked(candidates=drafting, lengths=fitting)
        if standing is not None and standing.num_drafting >= len(chosen):
            stop = standing.stop
        else:  # the standing one has no prices for so many: blocks were short when it was made
            stop = self._policy.stop_rule(drafting, fitting)
        if standing is None:
            self._standing = _Standing(
                slots=slots, survival=candidates.survival, lengths=lengths, stop=stop, num_drafting=len(chosen)
            )
            self._steps_left = min(count // _SEQUENCES_A_STEP, _MOST_STEPS_KEPT - 1)
        return Wish(chosen=tuple(chosen.tolist()), lengths=tuple(fitting.tolist()), stop=stop)

    def _stands(self, slots: Ints) -> bool:
        """Whether the last decision is kept: for some steps in a large batch, as long as nobody comes or goes.

        There what one step teaches moves little, and every cut is still judged by the drafts' own confidences.
        """
        self._steps_left -= 1
        return self._steps_left >= 0 and self._standing is not None and np.array_equal(self._standing.slots, slots)

    def _keep(self, drafts: Drafts) -> list[tuple[int, ...]]:
        assert self._asked is not None, "drafts come exactly when they were asked for"
        candidates = self._asked.candidates
        lengths = np.fromiter((len(each.token_ids) for each in drafts.drafts), np.int64, len(drafts.drafts))
        methods = np.array([_METHOD_IDS[each.method] for each in drafts.drafts], dtype=np.int64)
        confidences = np.zeros((len(lengths), self._cap))
        self._note_drafting(drafts, candidates, methods, lengths)
        self._acceptance.offered(candidates.slots, self._asked.lengths, lengths)
        survival, kept = candidates.survival, lengths
        if lengths.any():
            confidences[np.arange(self._cap) < lengths[:, None]] = [
                value for each in drafts.drafts for value in each.confidences
            ]
            survival = self._acceptance.drafted_survival(candidates.slots, methods, lengths, confidences)
        if self._point_mass:  # also where nobody had a draft: that tells the policy what looking up brings
            kept = self._policy.keep(replace(candidates, limit=lengths, survival=survival), lengths)
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
        modelled = np.where(by_model, lengths, 0)
        longest = int(modelled.max(initial=0))
        if drafts.passes and longest:
            # A pass whose tokens were all dropped is not in the lengths.
            predicted_s = self._costs.draft_s(modelled, candidates.lag) * drafts.passes / longest
            self._costs.observe(Role.PASS, predicted_s, drafts.run_s)
        else:
            predicted_s = self._costs.text_s(len(lengths))
            if not drafts.passes and Role.TEXT in self._costs.tables:
                self._costs.observe(Role.TEXT, predicted_s, drafts.run_s)
        self._drafting_s = (predicted_s, drafts.run_s)
        self._covered[candidates.slots[by_model]] += candidates.lag[by_model]

    def _roles(self) -> tuple[RoleStats, ...]:
        """The target's forward is called verify, as the cost model's role of that name is only part of a step."""
        roles = self._costs.stats()
        verify = [replace(each, role="verify") if each.role == Role.STEP else each for each in roles]
        return (self._whole.stats("step"), *verify)

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
        self._tally.plain(np.array([*brought], dtype=np.int64))
        judged = (accepted >= 0).nonzero()[0]
        if len(judged) == 0:
            return
        self._covered[drafted.slots[judged]] += np.where(
            drafted.methods[judged] < _NUM_MODELS, accepted[judged] + 1, 0
        )
        slots, kept, accepted = drafted.slots[judged], drafted.kept[judged], accepted[judged]
        methods, lengths = drafted.methods[judged], drafted.lengths[judged]
        offered = lengths.nonzero()[0]
        if len(offered):
            self._acceptance.learn(
                Outcomes(
                    slots=slots[offered],
                    methods=methods[offered],
                    drafted=lengths[offered],
                    verified=kept[offered],
                    accepted=accepted[offered],
                    confidences=drafted.confidences[judged[offered]],
                )
            )
        expected = drafted.survival[judged]
        expected = (expected[:, 1:] * (np.arange(self._cap) < kept[:, None])).sum(-1)
        self._tally.drafted(slots, methods, lengths, kept, accepted, expected)

    def _weights(self, slots: Ints, known: Ints) -> Floats:
        """1, or how far a sequence lags behind its target of time per token: (measured / target) squared.

        Source: the order of AdaServe (arXiv:2501.12162), first what targets need, then throughput.
        """
        targets = self._target_s[slots]
        if not targets.any():
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


def _subset(candidates: Candidates, chosen: NDArray[np.int64]) -> Candidates:
    """Some of the candidates; the others' pending tokens become other rows."""
    return Candidates(
        slots=candidates.slots[chosen],
        limit=candidates.limit[chosen],
        survival=candidates.survival[chosen],
        weight=candidates.weight[chosen],
        lag=candidates.lag[chosen],
        other_rows=candidates.other_rows + len(candidates.slots) - len(chosen),
        other_sequences=candidates.other_sequences + len(candidates.slots) - len(chosen),
        kv_tokens=candidates.kv_tokens,
    )
