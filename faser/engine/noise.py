"""Random numbers that are a function of (request seed, position, purpose, draft), and of nothing else.

Owns the counter-based generator and the layout of its counter. Keeps no state, so neither the batch, nor the
order of calls, nor a preemption can change a number. Knows nothing of tokens and probabilities.
"""

from collections.abc import Callable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_LOW_32 = np.uint64(0xFFFFFFFF)
_LOW_32_SIGNED = np.int64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)
_UNIT_53 = 2.0**-53  # the spacing of float64 just below 1

Words = NDArray[np.uint64]
Generator = Callable[[Words, Words], Words]


class Purpose(IntEnum):
    """What a number decides. Each purpose has numbers of its own at every position.

    TOKEN: the choice of a token. ACCEPT: the verdict on a drafted token. REPLACE: the token chosen after a
    refusal. DRAFT: the choice of a drafted token.
    """

    TOKEN = 0
    ACCEPT = 1
    REPLACE = 2
    DRAFT = 3


def uniforms(
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int64],
    purpose: Purpose,
    draft_starts: NDArray[np.int64] | None = None,
    generate: Generator | None = None,
) -> NDArray[np.float64]:
    """One number per row, uniform over the multiples of 2**-53 in [0, 1).

    seeds: [R], the requests' effective seeds. positions: [R], at least 0, of the tokens being decided on.
    draft_starts: [R], for DRAFT and ACCEPT: position of the first token of the draft that the row belongs to. A
    position that is drafted again, because an earlier one was refused, then gets a number of its own: the old one
    is not independent of what has become known meanwhile, so using it twice would bias the output.
    generate: computes what `philox` computes, perhaps sooner; None: `philox`.
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
    units: NDArray[np.float64] = (((words[0] << _SHIFT_32) | words[1]) >> np.uint64(11)) * _UNIT_53
    return units


def philox(counters: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox4x32-10: four words for each counter and key.

    counters: [4, R], keys: [2, R]; every entry is a 32-bit word held in a uint64. Neither is written to.
    Returns [4, R], words likewise.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4.3.
    """
    evens, odds = counters[0::2], counters[1::2]  # words (0, 2) are multiplied, (1, 3) are mixed in
    for _ in range(ROUNDS):
        products = evens * _MULTIPLIERS
        high, low = products >> _SHIFT_32, products & _LOW_32
        evens = high[::-1] ^ odds ^ keys
        odds = low[::-1]
        keys = (keys + _KEY_STEPS) & _LOW_32
    return np.stack((evens[0], odds[0], evens[1], odds[1]))
