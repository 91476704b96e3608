"""The sampling parameters of each slot, and the random numbers of its request.

What every sampled row needs is in arrays by slot, so that the metadata of a batch is a few array look-ups. What
few requests ask for is owned by the logits processors. A random number is a function of (request seed, position,
purpose, draft), and of nothing else: neither the batch nor the order of calls nor a preemption can change it.
"""

from collections.abc import Callable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from faser.engine.contract.plan import SequenceStart
from faser.kernels.interface.sampling import SamplingMetadata, philox
from faser.types.arrays import Ints, Words

_COLDEST = float(np.finfo(np.float32).tiny)  # a lower temperature gives the same probabilities
_WORD = 2**64


class SamplingState:
    """Only start and release write; the attributes are read by everyone.

    temperature … seed: [num_slots]; temperature is 0 where a slot is greedy or free, and the truncation is
    meaningful only where it is above 0. num_top: by slot, how many alternatives a request's log probabilities
    report; only slots that report any.
    """

    def __init__(self, num_slots: int) -> None:
        self._live: set[int] = set()
        self.temperature = np.zeros(num_slots, dtype=np.float32)
        self.min_p = np.zeros(num_slots, dtype=np.float64)
        self.top_k = np.zeros(num_slots, dtype=np.int64)
        self.top_p = np.ones(num_slots, dtype=np.float64)
        self.seed = np.zeros(num_slots, dtype=np.uint64)
        self.num_top: dict[int, int] = {}

    def start(self, start: SequenceStart) -> None:
        """A sequence takes over a free slot."""
        slot, sampling = start.slot, start.sampling
        assert slot not in self._live, f"slot {slot} is started twice"
        self._live.add(slot)
        self.seed[slot] = start.seed % _WORD
        self.temperature[slot] = 0.0 if sampling.greedy else max(sampling.temperature, _COLDEST)
        self.min_p[slot], self.top_k[slot], self.top_p[slot] = sampling.min_p, sampling.top_k, sampling.top_p
        if sampling.logprobs is not None:
            self.num_top[slot] = sampling.logprobs

    def release(self, slot: int) -> None:
        """The slot is free."""
        assert slot in self._live, f"slot {slot} is released but was not started"
        self._live.remove(slot)
        self.temperature[slot] = 0.0
        self.num_top.pop(slot, None)

    def metadata(self, slots: Ints, positions: Ints) -> SamplingMetadata:
        """Return the metadata [N] of rows of these slots, which may repeat. positions: of tokens; not copied."""
        return SamplingMetadata(
            temperature=self.temperature[slots],
            min_p=self.min_p[slots],
            top_k=self.top_k[slots],
            top_p=self.top_p[slots],
            seeds=self.seed[slots],
            positions=positions,
        )

    def is_random(self, slots: Ints) -> NDArray[np.bool_]:
        """Return whether the tokens of these slots are drawn at random: [N]."""
        random: NDArray[np.bool_] = self.temperature[slots] > 0
        return random

    def any_random(self, slots: Ints | list[int]) -> bool:
        return bool(self.temperature[slots].any())

    def check_invariants(self, *others: set[int]) -> None:
        """Nothing is remembered of a free slot. others: slots that other owners remember."""
        random = set(np.flatnonzero(self.temperature).tolist())
        for slots in (random, set(self.num_top), *others):
            assert self._live.issuperset(slots), f"slots {slots - self._live} are remembered but free"


_LOW_32 = np.uint64(0xFFFFFFFF)
_LOW_32_SIGNED = np.int64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)
_UNIT_53 = 2.0**-53  # the spacing of float64 just below 1

Generator = Callable[[Words, Words], Words]


class Purpose(IntEnum):
    """Purpose of a random word. Each purpose has words of its own at every position.

    TOKEN: which token is sampled. ACCEPT: whether a draft token is accepted. REPLACE: which token is recovered
    after a rejection. DRAFT: which token is drafted.
    """

    TOKEN = 0
    ACCEPT = 1
    REPLACE = 2
    DRAFT = 3


def noise_words(
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int64],
    purpose: Purpose,
    draft_starts: NDArray[np.int64] | None = None,
    generate: Generator | None = None,
) -> Words:
    """One random word of 64 bits per row.

    seeds: [R], the requests' effective seeds. positions: [R], at least 0, of the tokens being decided on.
    draft_starts: [R], for DRAFT and ACCEPT: position of the first token of the draft that the row belongs to. A
    position that is drafted again, because an earlier token was rejected, then gets a word of its own: the old
    one is not independent of the tokens known by then, so using it twice would bias the output. generate: a faster
    function that computes what `philox` computes; None: `philox`.
    """
    counters = np.empty((4, len(seeds)), dtype=np.uint64)
    counters[0] = positions & _LOW_32_SIGNED
    counters[1] = positions >> 32
    counters[2] = int(purpose)
    counters[3] = 0 if draft_starts is None else draft_starts & _LOW_32_SIGNED
    keys = np.empty((2, len(seeds)), dtype=np.uint64)
    np.bitwise_and(seeds, _LOW_32, out=keys[0])
    np.right_shift(seeds, _SHIFT_32, out=keys[1])
    words = (generate or philox)(counters, keys)
    found: Words = (words[0] << _SHIFT_32) | words[1]
    return found


def uniforms(words: Words) -> NDArray[np.float64]:
    """Numbers of these words, uniform over the multiples of 2**-53 in [0, 1)."""
    units: NDArray[np.float64] = (words >> np.uint64(11)).astype(np.float64) * _UNIT_53
    return units
