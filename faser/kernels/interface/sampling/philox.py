"""The counter-based generator of random words, on arrays.

What its counters mean is engine/execution/sampling/noise.py's. Source: Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011, section 4.3.
"""

import numpy as np

from faser.kernels.interface.sampling.sampling_kernels import Words

_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_LOW_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)


def philox(counters: Words, keys: Words) -> Words:
    """Philox4x32-10: [4, N] words of counters [4, N] and keys [2, N].

    Every entry is a 32-bit word held in a uint64. Neither argument is written to.
    """
    multiplied, mixed = counters[0::2], counters[1::2]
    for _ in range(_ROUNDS):
        products = multiplied * _MULTIPLIERS
        multiplied = (products >> _SHIFT_32)[::-1] ^ mixed ^ keys
        mixed = (products & _LOW_32)[::-1]
        keys = (keys + _KEY_STEPS) & _LOW_32
    return np.stack((multiplied[0], mixed[0], multiplied[1], mixed[1]))
