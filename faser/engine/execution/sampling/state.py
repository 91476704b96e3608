"""What the sampler remembers of each slot: parameters, and the tokens that penalties look at.

Numbers that every sampled row needs stand in arrays indexed by slot. What few requests ask for stands in
mappings that hold only the slots that asked, so an unused feature costs the test of an empty mapping. Keeps
everything on the host and knows no tensors.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.sampling.token_counts import TokenCounts
from faser.types import SamplingParams

_COLDEST = float(np.finfo(np.float32).tiny)  # a lower temperature gives the same probabilities
_WORD = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Tokens that may not be chosen before a position, because the sequence would end there."""

    until: int
    token_ids: NDArray[np.int64]


class SamplingState:
    """Everything is written by start, accept and release; the attributes are there to be read.

    Arrays [num_slots]: is_random, False where a slot is greedy or free; seed, of every started slot; temperature
    … top_p, meaningful where is_random; the penalties, meaningful in slots of `counts`. Mappings: num_top, slots
    that report log probabilities. bias: token ids and values. allowed: token ids. held: until min_tokens are
    there. counts: slots with a penalty.
    """

    def __init__(self, num_slots: int, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._live: set[int] = set()
        self.is_random = np.zeros(num_slots, dtype=np.bool_)
        self.temperature = np.ones(num_slots, dtype=np.float32)
        self.min_p = np.zeros(num_slots, dtype=np.float64)
        self.top_k = np.zeros(num_slots, dtype=np.int64)
        self.top_p = np.ones(num_slots, dtype=np.float64)
        self.seed = np.zeros(num_slots, dtype=np.uint64)
        self.repetition = np.ones(num_slots, dtype=np.float64)
        self.frequency = np.zeros(num_slots, dtype=np.float64)
        self.presence = np.zeros(num_slots, dtype=np.float64)
        self.num_top: dict[int, int] = {}
        self.bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self.allowed: dict[int, NDArray[np.int64]] = {}
        self.held: dict[int, Held] = {}
        self.counts: dict[int, TokenCounts] = {}

    def start(self, start: SequenceStart) -> None:
        """Take over a free slot."""
        slot, sampling = start.slot, start.sampling
        assert slot not in self._live, f"slot {slot} is started twice"
        self._live.add(slot)
        self.seed[slot] = start.seed % _WORD
        if not sampling.greedy:
            self._start_random(slot, sampling)
        if sampling.logprobs is not None:
            self.num_top[slot] = sampling.logprobs
        if sampling.logit_bias:
            self._start_bias(slot, sampling.logit_bias)
        if sampling.allowed_token_ids is not None:
            self.allowed[slot] = self._distinct(sampling.allowed_token_ids)
        if sampling.min_tokens:
            ends = sampling.stop_token_ids + (() if sampling.ignore_eos else self._eos_token_ids)
            self.held[slot] = Held(until=start.prompt_len + sampling.min_tokens, token_ids=self._distinct(ends))
        self._start_penalties(start)

    def accept(self, slot: int, token_id: int) -> None:
        """The sequence in the slot goes on with this token."""
        if slot in self.counts:
            self.counts[slot].add(token_id)

    def release(self, slot: int) -> None:
        """The slot is free."""
        assert slot in self._live, f"slot {slot} is released but was not started"
        self._live.remove(slot)
        self.is_random[slot] = False
        for mapping in (self.num_top, self.bias, self.allowed, self.held, self.counts):
            mapping.pop(slot, None)

    def check_invariants(self) -> None:
        """Only live slots are remembered."""
        random = set(np.flatnonzero(self.is_random).tolist())
        for slots in (random, self.num_top, self.bias, self.allowed, self.held, self.counts):
            assert self._live.issuperset(slots), f"slots {set(slots) - self._live} are remembered but free"

    def _start_random(self, slot: int, sampling: SamplingParams) -> None:
        self.is_random[slot] = True
        self.temperature[slot] = max(sampling.temperature, _COLDEST)
        self.min_p[slot] = sampling.min_p
        self.top_k[slot] = min(sampling.top_k, self._vocab_size)
        self.top_p[slot] = sampling.top_p

    def _start_bias(self, slot: int, pairs: tuple[tuple[int, float], ...]) -> None:
        total: dict[int, float] = {}
        for token_id, bias in pairs:
            total[token_id] = total.get(token_id, 0.0) + bias
        self.bias[slot] = (self._distinct(tuple(total)), np.array([total[i] for i in sorted(total)], np.float32))

    def _start_penalties(self, start: SequenceStart) -> None:
        sampling = start.sampling
        repeats = sampling.repetition_penalty != 1.0
        if not (repeats or sampling.frequency_penalty or sampling.presence_penalty):
            return
        self.repetition[start.slot] = sampling.repetition_penalty
        self.frequency[start.slot] = sampling.frequency_penalty
        self.presence[start.slot] = sampling.presence_penalty
        prompt, output = start.token_ids[: start.prompt_len], start.token_ids[start.prompt_len :]
        self.counts[start.slot] = TokenCounts(prompt if repeats else (), output)

    def _distinct(self, token_ids: tuple[int, ...]) -> NDArray[np.int64]:
        """Ascending. Ids outside the vocabulary are refused before a request gets here."""
        assert all(0 <= token_id < self._vocab_size for token_id in token_ids), "token id outside the vocabulary"
        return np.unique(np.array(token_ids, dtype=np.int64))
