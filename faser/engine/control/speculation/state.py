"""Who may draft, and what is known of them: caps, ends, targets, and what a draft model has seen, by slot.

Owns those arrays. Keeps what only depends on who is in a batch until somebody comes or goes. Knows neither
acceptance nor costs, and decides nothing.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from faser.engine.control.sequences.sequence import Sequence
from faser.engine.control.timing.clock import Clock

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_FOLLOW = 0.05  # weight of the newest answer in the usual length
_MOST_WEIGHT = 8.0  # a sequence that misses its target counts for so many that do not, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class _Members:
    """What does not change while the same sequences come in the same order. Arrays: [S], read only.

    ends: known tokens from which no draft is of use. targets: seconds a token, 0: none; None: nobody has one.
    """

    sequences: list[Sequence]
    slots: Ints
    caps: Ints
    ends: Ints
    ones: Floats
    targets: Floats | None


@dataclass(slots=True, kw_only=True)
class Batch:
    """Sequences before a step; [S] each, and slots and caps read only.

    caps: most tokens a draft of each may have. known: tokens of each. left: so many more could be drafted before
    its end. kv_tokens: known ones of all together.
    """

    slots: Ints
    caps: Ints
    known: Ints
    left: Ints
    kv_tokens: int


class SequenceStates:
    """num_slots lines. cap: most tokens of a draft."""

    def __init__(self, num_slots: int, cap: int, clock: Clock) -> None:
        self._cap = cap
        self._clock = clock
        self._caps: Ints = np.zeros(num_slots, dtype=np.int64)
        self._ends: Ints = np.zeros(num_slots, dtype=np.int64)
        self._covered: Ints = np.zeros(num_slots, dtype=np.int64)  # tokens that a draft model has in its cache
        self._target_s: Floats = np.zeros(num_slots)  # a token; 0: no target
        self._since_s: Floats = np.zeros(num_slots)  # when decoding began
        self._since_tokens: Ints = np.zeros(num_slots, dtype=np.int64)
        self._members: _Members | None = None
        self._num_ended = 0
        self._usual_len = 0.0  # tokens of an answer, followed

    def start(self, sequence: Sequence) -> None:
        """It takes over its slot with the tokens it has."""
        slot, asked = sequence.held_slot, sequence.request.speculation
        own = self._cap if asked.max_tokens is None else asked.max_tokens
        self._ends[slot] = sequence.max_total - 1
        self._caps[slot] = min(own, self._cap) if asked.enabled else 0
        self._covered[slot] = sequence.num_computed
        self._target_s[slot] = (asked.slo.tpot_ms or 0.0) / 1000
        self._since_tokens[slot] = 0
        self._members = None

    def release(self, sequence: Sequence) -> None:
        """It leaves; for good if it has ended."""
        self._members = None
        if sequence.finish_reason is not None:
            self._num_ended += 1
            weight = max(_FOLLOW, 1 / self._num_ended)
            self._usual_len += weight * (sequence.num_tokens - sequence.prompt_len - self._usual_len)

    def batch(self, sequences: Many[Sequence]) -> Batch:
        """What a step that these sequences take part in begins with."""
        members = self._members
        if members is None or members.sequences != sequences:
            members = self._members = self._gathered(sequences)
        known = [len(each.token_ids) for each in sequences]
        tokens = np.array(known, dtype=np.int64)
        return Batch(
            slots=members.slots, caps=members.caps, known=tokens, left=members.ends - tokens, kv_tokens=sum(known)
        )

    def lag(self, batch: Batch) -> Ints:
        """[S] tokens whose KV a draft model would have to refill first."""
        lag: Ints = batch.known - self._covered.take(batch.slots)
        return lag

    def expected(self, batch: Batch) -> Ints:
        """[S] tokens that each will bring yet: up to its end, or as many as answers usually have, if that is less.

        However many an answer has already, it says little about those to come.
        """
        return np.minimum(batch.left, round(self._usual_len)) if self._num_ended else batch.left

    def weights(self, batch: Batch) -> Floats:
        """1, or how far a sequence lags behind its target of time per token: (measured / target) squared.

        Of the last batch. [S], read only.

        Source: the order of AdaServe (arXiv:2501.12162), first what targets need, then throughput.
        """
        assert self._members is not None, "weights are those of the last batch"
        targets, slots, known = self._members.targets, batch.slots, batch.known
        if targets is None:
            return self._members.ones
        now = self._clock.now()
        fresh = self._since_tokens[slots] == 0
        self._since_s[slots[fresh]], self._since_tokens[slots[fresh]] = now, known[fresh]
        elapsed, tokens = now - self._since_s[slots], known - self._since_tokens[slots]
        lag = elapsed / np.maximum(tokens * targets, 1e-9)
        return np.where((targets > 0) & (tokens > 0), np.clip(lag * lag, 1.0, _MOST_WEIGHT), 1.0)

    def covers(self, slots: Ints, more: Ints) -> None:
        """A draft model has so many more tokens of each in its cache. [S]; no slot twice."""
        self._covered.put(slots, self._covered.take(slots) + more)

    def covers_upto(self, slots: Ints, ends: Many[int]) -> None:
        """A draft model has all tokens of each before these positions in its cache. [S]; no slot twice."""
        self._covered[slots] = ends

    def _gathered(self, sequences: Many[Sequence]) -> _Members:
        slots = np.array([each.held_slot for each in sequences], dtype=np.int64)
        targets = self._target_s[slots]
        return _Members(
            sequences=[*sequences],
            slots=slots,
            caps=self._caps[slots],
            ends=self._ends[slots],
            ones=np.ones(len(slots)),
            targets=targets if np.count_nonzero(targets) else None,
        )
