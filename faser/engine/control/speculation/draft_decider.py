"""DraftDecider: which sequences draft in a step, and how far.

Builds the Candidates that the policy looks at, within the caps of requests, the budget of rows and the KV blocks.
Owns the pauses in which the policy is not asked. A decision for a large batch serves several steps
(CachedDecision).
"""

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from math import ceil

import numpy as np

from faser.engine.contract.plan import StopRule
from faser.engine.control.sequences.sequence import Sequence
from faser.engine.control.speculation.acceptance.draft_arrays import DraftArrays
from faser.engine.control.speculation.acceptance.estimator import Acceptance
from faser.engine.control.speculation.decision import OtherRows, OverlapDecision
from faser.engine.control.speculation.overlap import OverlapControl
from faser.engine.control.speculation.policies.policy import Candidates, Ints, Policy
from faser.engine.control.speculation.state import Batch, CachedDecision, SpeculationState
from faser.engine.control.speculation.statistics import GAIN, LOAD, MEMORY, REQUEST, SpeculationStatistics
from faser.engine.control.step_cost import CostModel

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
            overlap.decide(candidates, None if self._policy.name == FASER else lengths)
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
