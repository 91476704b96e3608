"""DraftDecider: which sequences draft in a step, and how far.

Builds the Candidates that the policy looks at, within the caps of requests, the budget of rows and the KV blocks.
Owns the pauses in which the policy is not asked. A decision for a large batch serves several steps
(CachedDecision).
"""

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from faser.engine.contract.plan import StopRule
from faser.engine.control.sequences.sequence import Sequence
from faser.engine.control.speculation.acceptance.draft_arrays import DraftArrays
from faser.engine.control.speculation.acceptance.estimator import Acceptance
from faser.engine.control.speculation.decision import OtherRows, OverlapDecision
from faser.engine.control.speculation.overlap.control import OverlapControl
from faser.engine.control.speculation.policies.policy import Candidates, Ints, Policy
from faser.engine.control.speculation.state import Batch, CachedDecision, SpeculationState
from faser.engine.control.speculation.statistics import GAIN, LOAD, MEMORY, REQUEST, SpeculationStatistics

FASER = "faser"  # the policy with an objective that overlapped drafting shares
_LONGEST_PAUSE = 4  # steps: while no sequence drafts the policy is asked in every fifth step at least
_ZERO = np.array(0)

Room = Callable[[list[Sequence], list[int]], list[int]]


@dataclass(slots=True, kw_only=True)
class RequestedDrafts:
    """The drafts that are requested for a step.

    chosen: positions of the sequences that draft; candidates: these sequences; lengths: [S] tokens, at least 1.
    """

    chosen: Many[int]
    candidates: Candidates
    lengths: Ints
    stop: StopRule | None = None


class DraftDecider:
    """Asks the policy. overlap: None where drafts are never overlapped. cap: most tokens of a draft.

    by_model: a model drafts; else drafts come from text alone.
    """

    def __init__(
        self,
        policy: Policy,
        acceptance: Acceptance,
        state: SpeculationState,
        statistics: SpeculationStatistics,
        overlap: OverlapControl | None,
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
        self._cap = self._limit = cap
        self._pause = self._paused = 0  # steps for which the policy is not asked, and has not been
        self._since = 0  # steps since the policy was asked

    @property
    def policy(self) -> Policy:
        return self._policy

    def use_policy(self, policy: Policy, limit: int) -> None:
        """From the next step on this policy decides. limit: most tokens of a draft."""
        self._policy = policy
        self._limit = limit
        self._pause = self._paused = 0

    def skip_policy(self, count: int) -> bool:
        """Whether the policy pauses in the next step, of count sequences. If so the step is counted."""
        if self._paused >= self._pause:
            return False
        self._paused += 1
        self._statistics.count_bypasses(GAIN, count)
        return True

    def decide(
        self, sequences: Many[Sequence], others: OtherRows, budget: int, room: Room
    ) -> RequestedDrafts | None:
        """The drafts to make before the next step; see SpeculationControl.decide."""
        count = len(sequences)
        if self.skip_policy(count):
            return None
        batch = self._state.batch(sequences)
        limit = self._limits(batch, _rows_each(budget - count, others, count))
        if limit is None:
            return None
        overlap = self._overlap
        is_due = overlap is not None and overlap.is_due()
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
                return None
        requested = self._requested(sequences, candidates, lengths, room)
        if requested is None:
            return None
        if cached is not None and cached.num_drafting >= len(requested.lengths):
            requested.stop = cached.stop
        else:  # a cached rule has too few prices if blocks were short when it was made
            requested.stop = self._policy.stop_rule(requested.candidates, requested.lengths)
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
        slots, self._since, self._paused = batch.slots, self._since + 1 + self._paused, 0
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
            since=self._since,
        )

    def _requested(
        self, sequences: Many[Sequence], candidates: Candidates, lengths: Ints, room: Room
    ) -> RequestedDrafts | None:
        """What the sequences draft that have KV blocks for it; None: no sequence drafts."""
        count, num_wanted = len(sequences), np.count_nonzero(lengths)
        self._pause = 0 if num_wanted else min(self._pause + 1, _LONGEST_PAUSE)
        wanted = lengths.tolist()
        if num_wanted == count and room([*sequences], wanted) == wanted:
            return RequestedDrafts(chosen=range(count), candidates=candidates, lengths=lengths)
        self._statistics.count_bypassed(GAIN, (lengths <= 0) & (candidates.limit > 0))
        chosen, fitting = self._fitting(sequences, lengths, room)
        if not len(chosen):
            return None
        drafting = candidates if len(chosen) == count else candidates.among(chosen)
        return RequestedDrafts(chosen=chosen.tolist(), candidates=drafting, lengths=fitting)

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


def _rows_each(budget: int, others: OtherRows, count: int) -> int:
    """Most draft rows of each of count sequences. Prompts keep what they need, or half of the spare rows."""
    spare = budget - others.sequences
    return max(spare - min(others.rows - others.sequences, spare // 2), 0) // count
