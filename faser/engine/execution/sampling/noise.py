"""Random numbers that are a function of (request seed, position, purpose, draft), and of nothing else.

Owns the layout of the counter of a counter-based generator. Keeps no state, so neither the batch nor the order of
calls nor a preemption can change a number. Knows nothing of tokens and probabilities.
"""

from collections.abc import Callable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from faser.kernels.interface.sampling.philox import philox

_LOW_32 = np.uint64(0xFFFFFFFF)
_LOW_32_SIGNED = np.int64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)
_UNIT_53 = 2.0**-53  # the spacing of float64 just below 1

Words = NDArray[np.uint64]
Generator = Callable[[Words, Words], Words]


class Purpose(IntEnum):
    """What a number decides. Each purpose has numbers of its own at every position.

    TOKEN: which token is sampled. ACCEPT: whether a draft token is accepted. REPLACE: which token is recovered
    after a rejection. DRAFT: which token is drafted.
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
    position that is drafted again, because an earlier token was rejected, then gets a number of its own: the old
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
    units: NDArray[np.float64] = (((words[0] << _SHIFT_32) | words[1]) >> np.uint64(11)) * _UNIT_53
    return units
