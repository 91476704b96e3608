"""What the scheduler and SpeculationControl exchange about one step. Values, no torch.

DraftDecider: which sequences draft in a step, and how far.

Builds the Candidates that the policy looks at, within the caps of requests, the budget of rows and the KV blocks.
Owns the pauses in which the policy is not asked. A decision for a large batch serves several steps
(CachedDecision).

DrafterSelection: the two rounds of drafting in an engine of method `auto`, and the choice between text drafts.

The text look-up costs next to nothing, so it answers first, with a draft of every method for every request. Of
these a sequence gets the one with the most expected tokens. Where there is a draft model too, the policy then says
for which sequences that model drafts instead:

    DraftPlan (from_text) ──▶ Drafts: a draft per request and method ──▶ one text draft for each request
    DraftPlan (requests left to the model, if any) ──▶ Drafts ──▶ one draft for every request

Owns the round between the two. What drafters are worth is in Acceptance; a text draft that is not taken teaches it
too, since it can be compared with the tokens that came anyway. Motivation: arXiv 2601.11580, which finds more to
win in the choice of the drafter than in the length of the draft.

The choice depends on committed tokens alone, so it leaves the distribution of the output as it is; and where
drafts are point masses, as drafts from text always are, it changes no token either.

OutcomeLearner: what drafts cost and what became of them, passed on to the estimates and the counters.

Owns nothing that lasts. Teaches Acceptance which draft tokens were accepted and CostModel what drafting took, and
writes down in SpeculationState which tokens the draft KV cache holds.

SpeculationControl: the order of a step with speculation.

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
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from math import ceil
from operator import attrgetter
from types import MappingProxyType

import numpy as np

from faser.config.drafters import DRAFT_METHODS, MOST_STATES_READ
from faser.config.speculation import AUTO, SpeculationConfig
from faser.engine.contract.plan import (
    Draft,
    DraftPlan,
    Drafts,
    SequenceResult,
    SequenceRows,
    StepPlan,
    StepResult,
    StopRule,
)
from faser.engine.contract.step_times import Role
from faser.engine.control.clock import Clock
from faser.engine.control.sequence import Sequence, Status
from faser.engine.control.speculation.acceptance import (
    FIRST_TEXT,
    Acceptance,
    DraftArrays,
    DraftReader,
    ReadDrafts,
    Verdicts,
    came_tokens,
    with_dropped,
)
from faser.engine.control.speculation.overlap import OFF, OverlapControl, OverlapOptions
from faser.engine.control.speculation.policies import make_policy
from faser.engine.control.speculation.policy import Candidates, Floats, Ints, Policy
from faser.engine.control.speculation.state import Batch, CachedDecision, SpeculationState
from faser.engine.control.speculation.statistics import GAIN, LOAD, MEMORY, REQUEST, SERIAL, SpeculationStatistics
from faser.engine.control.step_cost import CostModel, GapKind
from faser.errors import ConfigError
from faser.types import PruneStats, SpeculationStats, SpeculationSummary, StepTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRows:
    """The rows of a step in addition to those of the sequences that may draft.

    rows: how many there are. sequences: how many of them bring a sequence its next token. launches_ahead: without
    drafts the step could be launched before the one in flight has ended.
    """

    rows: int
    sequences: int
    launches_ahead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftDecision:
    """Which sequences draft before a step.

    chosen: their positions among the sequences that may draft. lengths: most tokens of each, at least 1.
    """

    chosen: tuple[int, ...]
    lengths: tuple[int, ...]
    stop: StopRule | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapDecision:
    """Which sequences draft concurrently with a step.

    chosen: as in DraftDecision. slots, lengths: [N] each. share: of the processors that the drafter gets.
    """

    chosen: tuple[int, ...]
    slots: Ints
    lengths: Ints
    share: float


FASER = "faser"  # the policy with an objective that overlapped drafting shares
_SHORT_PAUSE = 4  # steps without asking the policy that are always allowed while no sequence drafts
_LONGEST_PAUSE = 256  # steps: as for the rarest probe, so that a load that has changed is noticed within seconds
_ASKING_SHARE = 0.004  # of the time that asking in vain takes at most, as for probes: too little to be measured
_CHANGED_SHARE = 4  # a pause ends early once one sequence in 4 has come or gone: the last answer was for others
_ZERO = np.array(0)

Room = Callable[[list[Sequence], list[int]], list[int]]


@dataclass(slots=True, kw_only=True)
class RequestedDrafts:
    """The drafts that are requested for a step.

    chosen: positions of the sequences that draft; candidates: these sequences; lengths: [S] tokens, at least 1.
    is_new: the decision was made for this step; else a cached one serves it.
    """

    chosen: Many[int]
    candidates: Candidates
    lengths: Ints
    stop: StopRule | None = None
    is_new: bool = True


class DraftDecider:
    """Asks the policy. overlap: None where drafts are never overlapped. cap: most tokens of a draft.

    by_model: a model drafts; else drafts come from text alone.

    While no sequence drafts, the policy pauses: 1, 2, 3, 4, 8, 16, … steps, up to a pause that is long enough for
    the time of asking to be a small share of all time. Where steps are launched ahead, the time of asking is the
    gap that it leaves on the device.
    """

    def __init__(
        self,
        policy: Policy,
        acceptance: Acceptance,
        state: SpeculationState,
        statistics: SpeculationStatistics,
        overlap: OverlapControl | None,
        costs: CostModel,
        *,
        cap: int,
        by_model: bool,
    ) -> None:
        self._by_model = by_model
        self._policy = policy
        self._acceptance = acceptance
        self._state = state
        self._statistics = statistics
        self._overlap = overlap
        self._costs = costs
        self._cap = self._limit = cap
        self._asked = False  # since the last step was learned from
        self._since = 0  # steps since the policy was asked
        self._pause = self._paused = 0  # steps for which no decision is to be made, and has not been
        self._long_enough = _Pauses()
        self._changes_seen = 0

    @property
    def policy(self) -> Policy:
        return self._policy

    def use_policy(self, policy: Policy, limit: int) -> None:
        """From the next step on this policy decides. limit: most tokens of a draft."""
        self._policy = policy
        self._limit = limit
        self._pause = self._paused = 0
        self._long_enough = _Pauses()

    def skip_policy(self, count: int, *, launches_ahead: bool) -> bool:
        """Whether the policy pauses in the next step, of count sequences. If so the step is counted.

        launches_ahead: the step can be launched before the one in flight has ended, unless the policy is asked.
        """
        reason = GAIN
        if not self._state.any_may_draft:
            reason = REQUEST
        elif not self._policy.never_drafts and self._pause_ends(count, launches_ahead=launches_ahead):
            return False
        self._paused += 1
        self._since += 1
        self._statistics.count_bypasses(reason, count)
        return True

    def take_asked(self) -> bool:
        """Whether the policy was asked since the last call."""
        asked, self._asked = self._asked, False
        return asked

    def _pause_ends(self, count: int, *, launches_ahead: bool) -> bool:
        longest = self._long_enough.launched_ahead if launches_ahead else self._long_enough.waiting
        if self._paused >= min(self._pause, longest):
            return True
        changed = self._state.num_changes - self._changes_seen
        return self._paused >= _SHORT_PAUSE and changed * _CHANGED_SHARE >= count

    def decide(
        self, sequences: Many[Sequence], others: OtherRows, budget: int, room: Room
    ) -> RequestedDrafts | None:
        """The drafts to make before the next step; see SpeculationControl.decide."""
        count = len(sequences)
        if self.skip_policy(count, launches_ahead=False):
            return None
        num_steps, self._paused, self._changes_seen = 1 + self._paused, 0, self._state.num_changes
        batch = self._state.batch(sequences)
        limit = self._limits(batch, _rows_each(budget - count, others, count))
        if limit is None:
            self._since += 1
            self._lengthen_pause()
            return None
        overlap = self._overlap
        is_due = overlap is not None and overlap.is_due(num_steps)
        if overlap is not None and overlap.lanes is not None and not is_due:
            return None
        cached = self._state.cached_decision(count, is_due=is_due)
        if cached is None:
            self._acceptance.learn_held()
        candidates = self._candidates(batch, limit, others, cached)
        if cached is None:
            lengths, self._since = self._policy.lengths(candidates), 0
        else:
            lengths = np.minimum(cached.lengths.take(batch.slots), limit)
        if overlap is not None and is_due:
            overlap.judge(candidates, None if self._policy.name == FASER else lengths)
            if overlap.lanes is not None:
                self._state.expire_decision()
                self._pause = 0
                return None
        requested = self._requested(sequences, candidates, lengths, room)
        if requested is None:
            return None
        if cached is not None and cached.num_drafting >= len(requested.lengths):
            requested.stop = cached.stop
        else:  # a cached rule has too few prices if blocks were short when it was made
            requested.stop = self._policy.stop_rule(requested.candidates, requested.lengths)
        requested.is_new = cached is None
        if cached is None:
            self._state.cache_decision(candidates, lengths, requested.stop, len(requested.chosen))
        return requested

    def chunks(
        self, sequences: Many[Sequence], others: OtherRows, budget: int, overlap: OverlapControl
    ) -> tuple[list[tuple[int, ...]], DraftArrays | None]:
        """What the next step verifies of overlapped drafts; see SpeculationControl.chunks."""
        count = len(sequences)
        batch = self._state.batch(sequences)
        limit = np.minimum(batch.caps, batch.remaining)
        candidates = Candidates(
            slots=batch.slots,
            limit=np.clip(limit, 0, _rows_each(budget - count, others, count)),
            survival=np.ones((count, self._cap + 1)),  # replaced by that of the drafts
            weight=self._state.weights(batch),
            missing_kv=np.zeros_like(limit),
            other_rows=others.rows,
            other_sequences=others.sequences,
            kv_tokens=batch.kv_tokens,
        )
        return overlap.chunks(candidates, self._policy)

    def decide_overlapped(
        self,
        sequences: Many[Sequence],
        num_unverified: Many[int],
        budget: int,
        room: Room,
        overlap: OverlapControl,
    ) -> OverlapDecision | None:
        """The drafts to make during the next step; see SpeculationControl.decide_overlapped."""
        batch = self._state.batch(sequences)
        unverified = np.array(num_unverified, dtype=np.int64)
        # The first token of such a draft is no row of the next step: by then it is the bonus token, or wrong.
        limit = np.minimum(np.minimum(batch.caps, self._limit), batch.remaining - unverified)
        lengths = overlap.lengths(batch.slots, np.minimum(limit, max(budget // len(sequences), 1)))
        chosen, fitting = self._fitting(sequences, lengths, room, unverified)
        if not len(chosen):
            return None
        return OverlapDecision(
            chosen=tuple(chosen.tolist()), slots=batch.slots[chosen], lengths=fitting, share=overlap.share
        )

    def _limits(self, batch: Batch, rows_each: int) -> Ints | None:
        """[S] most tokens that each sequence may draft; None: no sequence may draft any."""
        wanted = np.minimum(batch.caps, batch.remaining)
        limit: Ints = np.minimum(wanted, min(self._limit, rows_each))
        if np.count_nonzero(limit > _ZERO) == len(limit):
            return limit
        self._statistics.count_bypassed(REQUEST, wanted <= 0)
        self._statistics.count_bypassed(LOAD, (wanted > 0) & (limit <= 0))
        return np.maximum(limit, 0) if limit.max() > 0 else None

    def _candidates(
        self, batch: Batch, limit: Ints, others: OtherRows, cached: CachedDecision | None
    ) -> Candidates:
        """What the policy looks at. A cached decision keeps the survival that it was made with."""
        slots, self._since, self._asked = batch.slots, self._since + 1, True
        return Candidates(
            slots=slots,
            limit=limit,
            survival=self._acceptance.survival(slots, by_model=self._by_model)
            if cached is None
            else cached.survival.take(slots, axis=0),
            weight=self._state.weights(batch),
            missing_kv=self._state.missing_kv(batch),
            remaining=self._state.expected_tokens(batch),
            other_rows=others.rows,
            other_sequences=others.sequences,
            kv_tokens=batch.kv_tokens,
            launches_ahead=others.launches_ahead and self._costs.host_gaps.schedules_async,
            since=self._since,
        )

    def _requested(
        self, sequences: Many[Sequence], candidates: Candidates, lengths: Ints, room: Room
    ) -> RequestedDrafts | None:
        """What the sequences draft that have KV blocks for it; None: no sequence drafts."""
        count, num_wanted = len(sequences), np.count_nonzero(lengths)
        wanted = lengths.tolist()
        if num_wanted == count and room([*sequences], wanted) == wanted:
            self._pause = 0
            return RequestedDrafts(chosen=range(count), candidates=candidates, lengths=lengths)
        self._statistics.count_bypassed(GAIN, (lengths <= 0) & (candidates.limit > 0))
        chosen, fitting = self._fitting(sequences, lengths, room)
        if not len(chosen):
            self._long_enough = self._pauses(candidates)
            self._lengthen_pause()
            return None
        self._pause = 0
        drafting = candidates if len(chosen) == count else candidates.among(chosen)
        return RequestedDrafts(chosen=chosen.tolist(), candidates=drafting, lengths=fitting)

    def _lengthen_pause(self) -> None:
        self._pause = min(self._pause + 1 if self._pause < _SHORT_PAUSE else 2 * self._pause, _LONGEST_PAUSE)

    def _pauses(self, candidates: Candidates) -> "_Pauses":
        """Pauses in which steps without drafts take so long that asking once takes a small share of that."""
        decodes = candidates.num_sequences + candidates.other_sequences
        asking_s, share_s = self._costs.host_gaps.asking_s, _ASKING_SHARE * self._costs.step_s(decodes)
        waiting, launched_ahead = (
            max(_SHORT_PAUSE, ceil(asking_s(decodes, hidden=hidden) / share_s)) for hidden in (False, True)
        )
        return _Pauses(waiting=waiting, launched_ahead=launched_ahead)

    def _fitting(
        self, sequences: Many[Sequence], lengths: Ints, room: Room, unverified: Ints | None = None
    ) -> tuple[Ints, Ints]:
        """Positions of the sequences with KV blocks for their drafts, and how many tokens fit: [N] each.

        unverified: [S] tokens before the draft that need blocks as well; None: there are none.
        """
        chosen = lengths.nonzero()[0]
        num_tokens = (lengths if unverified is None else lengths + unverified)[chosen].tolist()
        fitting = np.array(room([sequences[i] for i in chosen.tolist()], num_tokens), dtype=np.int64)
        if unverified is not None:
            fitting -= unverified[chosen]
        self._statistics.count_bypassed(MEMORY, fitting <= 0)
        fits = fitting > 0
        return chosen[fits], fitting[fits]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pauses:
    """Steps without asking the policy that are long enough: where the next step waits for the one before anyway,
    and where it could be launched ahead.
    """

    waiting: int = _SHORT_PAUSE
    launched_ahead: int = _SHORT_PAUSE


def _rows_each(budget: int, others: OtherRows, count: int) -> int:
    """Most draft rows of each of count sequences. Prompts keep what they need, or half of the spare rows."""
    spare = budget - others.sequences
    return max(spare - min(others.rows - others.sequences, spare // 2), 0) // count


_token_ids = attrgetter("token_ids")


@dataclass(slots=True, kw_only=True)
class TextRound:
    """The text look-up's answer to a plan, one draft for each of its S requests.

    lengths: [S]. survival: [S, K + 1] of these drafts. read: all drafts that were looked up, and chosen: [S] the
    positions of these among them; None: none has a token.
    """

    plan: DraftPlan
    looked_up: Drafts
    drafts: tuple[Draft, ...]
    lengths: Ints
    survival: Floats
    read: ReadDrafts | None
    chosen: Ints

    def not_taken(self, by_model: Ints) -> ReadDrafts | None:
        """Drafts from text in whose place another one was taken; None: there are none.

        by_model: [S] tokens that the model drafts; 0: the text draft stays.
        """
        if self.read is None:
            return None
        others = self.read.lengths > 0
        others[self.chosen[by_model == 0]] = False
        return self.read.among(others.nonzero()[0]) if np.count_nonzero(others) else None


class DrafterSelection:
    """acceptance: what drafts are worth, only to be read. has_model: the policy may leave requests to a model."""

    def __init__(self, acceptance: Acceptance, *, has_model: bool) -> None:
        self.has_model = has_model
        self._acceptance = acceptance
        self._reader = DraftReader(acceptance.cap)
        self._plan: DraftPlan | None = None  # the plan whose text drafts are being looked up
        self._round: TextRound | None = None  # the round that waits for the model's drafts
        self._modelled: tuple[int, ...] = ()  # positions of the requests that the model drafts for

    @property
    def waits_for_model(self) -> bool:
        return self._round is not None

    def first_round(self, plan: DraftPlan) -> DraftPlan:
        """The plan that goes out first: the same requests, for the text look-up."""
        self._plan = plan
        return replace(plan, from_text=True)

    def choose_text(self, looked_up: Drafts) -> TextRound:
        """The best draft from text for each request of the plan that went out."""
        assert self._plan is not None, "drafts come exactly when they were asked for"
        plan, self._plan = self._plan, None
        count, drafts = len(plan.requests), looked_up.drafts
        if not any(map(_token_ids, drafts)):
            survival = np.zeros((count, self._acceptance.cap + 1))
            survival[:, 0] = 1.0
            return TextRound(
                plan=plan,
                looked_up=looked_up,
                drafts=drafts[:count],
                lengths=np.zeros(count, dtype=np.int64),
                survival=survival,
                read=None,
                chosen=np.arange(count),
            )
        read = self._reader.read(drafts)
        survival = self._acceptance.drafted_survival(read.slots, read.methods, read.lengths, read.confidences)
        values = np.add.reduce(survival, axis=1).reshape(-1, count)
        chosen = values.argmax(axis=0) * count + np.arange(count)
        return TextRound(
            plan=plan,
            looked_up=looked_up,
            drafts=tuple([drafts[i] for i in chosen.tolist()]),
            lengths=read.lengths[chosen],
            survival=survival[chosen],
            read=read,
            chosen=chosen,
        )

    def leave_to_model(self, found: TextRound, lengths: Ints, stop: StopRule | None) -> DraftPlan | None:
        """The plan for the requests that the model drafts for; None: all drafts are from text.

        lengths: [S] tokens; 0: the text draft stays. While a step runs (the plan has a share) the model's plan
        follows always, without requests if all drafts are from text: the step's lanes are divided already.
        """
        self._modelled = tuple(lengths.nonzero()[0].tolist())
        if not self._modelled and found.plan.share is None:
            return None
        self._round = found
        requests = [
            replace(found.plan.requests[i], max_tokens=lengths.item(i), new_blocks=()) for i in self._modelled
        ]
        return replace(found.plan, requests=tuple(requests), released=(), stop=stop)

    def complete(self, from_model: Drafts) -> Drafts:
        """One draft for every request; times and passes are those of both rounds."""
        assert self._round is not None
        found, self._round = self._round, None
        drafts = [*found.drafts]
        for i, draft in zip(self._modelled, from_model.drafts, strict=True):
            drafts[i] = draft
        return replace(
            found.looked_up,
            drafts=tuple(drafts),
            run_s=found.looked_up.run_s + from_model.run_s,
            passes=from_model.passes,
            catchup_tokens=from_model.catchup_tokens,
        )


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
