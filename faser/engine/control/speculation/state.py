"""SpeculationState: what decisions read about the running sequences, by slot.

Owns each sequence's draft cap and end, how much of it the draft KV cache holds, the clock of its latency target,
the decision that is reused for several steps, and the overlapped drafts (Frontiers). Knows neither acceptance nor
costs, and decides nothing.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from faser.engine.contract.plan import StopRule
from faser.engine.control.clock import Clock
from faser.engine.control.sequence import Sequence
from faser.engine.control.speculation.overlap import Frontiers
from faser.engine.control.speculation.policy import Candidates, DraftingSequences, OtherRows, StepFacts
from faser.types.arrays import Floats, Ints

# Reasoned, not fitted: how throughput changes with each halved or doubled is in results/control-constants.json.
_ANSWER_WEIGHT = 0.05  # of the newest answer in the mean answer length
_SEQUENCES_PER_STEP, _MOST_STEPS_KEPT = 12, 6  # a decision for 12 sequences serves 2 steps, for 60 it serves 6
_LOOK_UP_STEPS = 4  # that a decision to look up drafts serves, whatever the number of sequences
_CHANGED = 16  # a decision ends once one sequence in 16 has come or gone


@dataclass(frozen=True, slots=True, kw_only=True)
class _Members:
    """Facts that stay while the same sequences come in the same order. Arrays: [S], read only.

    ends: number of known tokens from which a draft is useless. lacking: 0, and -inf of sequences without a target.
    wanted_per_s: as in DraftingSequences.
    """

    sequences: list[Sequence]
    slots: Ints
    caps: Ints
    ends: Ints
    lacking: Floats
    wanted_per_s: Floats
    have_targets: bool


@dataclass(slots=True, kw_only=True)
class Batch:
    """The sequences that may draft before a step. Arrays: [S]; slots and caps are read only.

    caps: most tokens of a draft. known: tokens of the sequence. remaining: most tokens that a draft could bring
    before the sequence ends. kv_tokens: known tokens of all sequences together.
    """

    slots: Ints
    caps: Ints
    known: Ints
    remaining: Ints
    kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedDecision:
    """A decision that serves several steps, by slot: in large batches one step teaches too little to decide again,
    and where drafts come from text the only question is whether to look.

    survival, lengths: [slots, K + 1] and [slots], as in Candidates and Policy.lengths; lengths are written when a
    sequence starts. usual: mean length, given to a sequence that starts later. num_sequences: that it was made
    for. stop: its rule has prices for num_drafting sequences.
    """

    survival: Floats
    lengths: Ints
    usual: int
    num_sequences: int
    stop: StopRule | None
    num_drafting: int


class SpeculationState:
    """Arrays of num_slots lines. cap: most tokens of a draft.

    looks_up: drafts come from text alone; then a decision serves several steps in small batches too. catches_up: a
    draft model has to compute all tokens that its KV cache lacks before it drafts. most_missing: it computes the
    latest ones only, at most this many; None: all.
    """

    def __init__(
        self,
        num_slots: int,
        cap: int,
        clock: Clock,
        *,
        looks_up: bool = False,
        catches_up: bool = True,
        most_missing: int | None = None,
    ) -> None:
        self.frontiers = Frontiers(num_slots)
        self.num_changes = 0  # sequences that have started or left
        self._num_slots = num_slots
        self._cap = cap
        self._clock = clock
        self._caps: Ints = np.zeros(num_slots, dtype=np.int64)
        self._ends: Ints = np.zeros(num_slots, dtype=np.int64)
        self._catches_up = catches_up
        self._nothing: Ints = np.zeros(num_slots, dtype=np.int64)
        self._most_missing = most_missing
        self._draft_kv: Ints = np.zeros(num_slots, dtype=np.int64)  # tokens in the draft KV cache
        self._wanted_per_s: Floats = np.zeros(num_slots)  # tokens, by the target; 0: no target
        self._since_s: Floats = np.zeros(num_slots)  # when decoding began
        self._since_tokens: Ints = np.zeros(num_slots, dtype=np.int64)
        self._announced: Ints = np.zeros(num_slots, dtype=np.int64)  # known tokens at the end; 0: not announced
        self._members: _Members | None = None
        self._num_drafting = 0  # slots whose sequence may have drafts
        self._num_ended = 0
        self._mean_answer_len = 0.0  # tokens, exponentially weighted
        self._looks_up = looks_up
        self._decision: CachedDecision | None = None
        self._steps_left = 0

    def start(self, sequence: Sequence) -> None:
        """The sequence takes over its slot. A cached decision gives it the usual draft length."""
        slot, asked = sequence.held_slot, sequence.request.speculation
        own = self._cap if asked.max_tokens is None else asked.max_tokens
        self._ends[slot] = sequence.max_total - 1
        self._caps[slot] = min(own, self._cap) if asked.enabled else 0
        self._num_drafting += bool(self._caps[slot])
        self.num_changes += 1
        self._draft_kv[slot] = 0
        target_ms = sequence.request.token_target_ms
        self._wanted_per_s[slot] = 0.0 if target_ms is None else 1000 / target_ms
        self._since_s[slot], self._since_tokens[slot] = sequence.decoding_since
        announced = sequence.request.expected_tokens
        self._announced[slot] = 0 if announced is None else sequence.prompt_len + announced
        self._members = None
        if self._decision is not None:
            self._decision.lengths[slot] = self._decision.usual
        self.frontiers.start(slot)

    def release(self, sequence: Sequence) -> None:
        """The sequence leaves its slot, for good if it has a finish reason."""
        self._members = None
        slot = sequence.held_slot
        sequence.decoding_since = self._since_s.item(slot), self._since_tokens.item(slot)
        self._num_drafting -= bool(self._caps[slot])
        self.num_changes += 1
        if sequence.finish_reason is not None:
            self._num_ended += 1
            weight = max(_ANSWER_WEIGHT, 1 / self._num_ended)
            self._mean_answer_len += weight * (sequence.num_tokens - sequence.prompt_len - self._mean_answer_len)
        self.frontiers.release(slot)

    @property
    def any_may_draft(self) -> bool:
        """At least one sequence has a draft cap above 0."""
        return self._num_drafting > 0

    def batch(self, sequences: Many[Sequence]) -> Batch:
        """The arrays of these sequences, before a step that they take part in."""
        members = self._members
        if members is None or members.sequences != sequences:
            members = self._members = self._gathered(sequences)
        known = [len(each.token_ids) for each in sequences]
        tokens = np.array(known, dtype=np.int64)
        return Batch(
            slots=members.slots,
            caps=members.caps,
            known=tokens,
            remaining=members.ends - tokens,
            kv_tokens=sum(known),
        )

    def missing_kv(self, batch: Batch) -> Ints:
        """Return how many known tokens [S] the draft KV cache lacks. Read only."""
        if not self._catches_up:
            return self._nothing[: len(batch.slots)]
        missing: Ints = batch.known - self._draft_kv.take(batch.slots)
        if self._most_missing is None or not np.count_nonzero(missing > self._most_missing):
            return missing
        fewer: Ints = np.minimum(missing, self._most_missing)
        self.extend_draft_kv(batch.slots, missing - fewer)
        return fewer

    def expected_tokens(self, batch: Batch) -> Ints:
        """Return the tokens [S] that each sequence is expected to generate yet, at most up to its end.

        They are what its client has announced, else the mean answer length. The tokens it has generated already do
        not count beside a mean: they say little about those to come.
        """
        usual: Ints = batch.remaining
        if self._num_ended:
            usual = np.minimum(usual, round(self._mean_answer_len))
        announced = self._announced.take(batch.slots)
        if not np.count_nonzero(announced):
            return usual
        left = np.clip(announced - batch.known, 1, np.maximum(batch.remaining, 1))
        return np.where(announced > 0, left, usual)

    def lacking(self, batch: Batch) -> tuple[Floats, Floats]:
        """Return DraftingSequences.lacking and wanted_per_s, [S] each. Read only.

        batch: the one that `batch` returned last. The time of a sequence's tokens is measured from its first call
        on, through preemptions: what it waits counts.
        """
        members = self._members
        assert members is not None, "what is lacking is that of the last batch"
        if not members.have_targets:
            return members.lacking, members.wanted_per_s
        slots, known, now = batch.slots, batch.known, self._clock.now()
        fresh = self._since_tokens[slots] == 0
        self._since_s[slots[fresh]], self._since_tokens[slots[fresh]] = now, known[fresh]
        elapsed, tokens = now - self._since_s[slots], known - self._since_tokens[slots]
        return members.lacking + (elapsed * members.wanted_per_s - tokens), members.wanted_per_s

    def candidates(
        self,
        batch: Batch,
        limit: Ints,
        survival: Floats,
        others: OtherRows,
        *,
        missing_kv: Ints,
        expected: Ints,
        since: int = 1,
    ) -> Candidates:
        """Return the policy's input. Arguments as in its parts; batch: the one that `batch` returned last."""
        facts = StepFacts(
            other_rows=others.rows,
            other_sequences=others.sequences,
            kv_tokens=batch.kv_tokens,
            kv_sequences=len(batch.slots),
            since=since,
        )
        sequences = DraftingSequences(batch.slots, *self.lacking(batch), missing_kv, expected)
        return Candidates(sequences, limit, survival, facts)

    @property
    def have_targets(self) -> bool:
        """Some sequence of the last batch has a target."""
        return self._members is not None and self._members.have_targets

    def extend_draft_kv(self, slots: Ints, counts: Ints) -> None:
        """The draft KV cache now holds `counts` more tokens of each sequence. [S]; no slot occurs twice."""
        self._draft_kv.put(slots, self._draft_kv.take(slots) + counts)

    def set_draft_kv(self, slots: int | Ints, ends: int | Many[int]) -> None:
        """The draft KV cache now holds each sequence up to these positions. [S]; no slot occurs twice."""
        self._draft_kv[slots] = ends

    @property
    def decision_expired(self) -> bool:
        """The next step needs a new decision, so outcomes may teach the estimates now."""
        return self._steps_left <= 0

    def cached_decision(self, count: int, *, is_due: bool) -> CachedDecision | None:
        """The decision that serves a step of count sequences; None: a new one is needed. Counts the step.

        is_due: a new decision is wanted for another reason.
        """
        self._steps_left -= 1
        decision = self._decision
        if decision is None or self._steps_left < 0 or is_due or _membership_changed(decision, count):
            return None
        return decision

    def cache_decision(
        self, candidates: Candidates, lengths: Ints, stop: StopRule | None, num_drafting: int
    ) -> None:
        """Keep the decision of this step for the following steps, if the batch is large enough."""
        count = candidates.num_sequences
        self._steps_left = min(count // _SEQUENCES_PER_STEP, _MOST_STEPS_KEPT - 1)
        if self._looks_up:
            self._steps_left = _LOOK_UP_STEPS - 1
        self._decision = None
        if not self._steps_left:
            return
        usual = round(int(lengths.sum()) / count)
        by_slot = np.full(self._num_slots, usual, dtype=np.int64)
        by_slot[candidates.slots] = lengths
        survival = np.empty((self._num_slots, self._cap + 1))
        survival[:] = candidates.survival.sum(axis=0) / count
        survival[candidates.slots] = candidates.survival
        self._decision = CachedDecision(
            survival=survival,
            lengths=by_slot,
            usual=usual,
            num_sequences=count,
            stop=stop,
            num_drafting=num_drafting,
        )

    def drop_decision(self) -> None:
        """The next step needs a new decision, as another policy makes it."""
        self._decision = None

    def expire_decision(self) -> None:
        """No decision is cached any more, and outcomes teach the estimates at once."""
        self._decision, self._steps_left = None, 0

    def _gathered(self, sequences: Many[Sequence]) -> _Members:
        slots = np.array([each.held_slot for each in sequences], dtype=np.int64)
        wanted_per_s = self._wanted_per_s[slots]
        return _Members(
            sequences=[*sequences],
            slots=slots,
            caps=self._caps[slots],
            ends=self._ends[slots],
            lacking=np.where(wanted_per_s > 0, 0.0, -np.inf),
            wanted_per_s=wanted_per_s,
            have_targets=bool(np.count_nonzero(wanted_per_s)),
        )


def _membership_changed(decision: CachedDecision, count: int) -> bool:
    """Too many sequences have started or left for the decision to fit the batch."""
    return abs(count - decision.num_sequences) * _CHANGED > count
