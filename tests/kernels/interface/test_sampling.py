"""The numbers by which tokens race: one at a time in plain Python, and their distribution.

Planted bugs that these tests have caught: a word of the other half, blocks counted from the end of a short row's
columns, a mantissa that is not centred (numbers near 0 lose their digits), a share of 1.
"""

import math

import numpy as np
import pytest

from faser.kernels.interface.sampling import RACE_BLOCK, arrivals, philox


def plain(word: int, at: int) -> float:
    counter = np.array([at // 2, 0, 4, 0], dtype=np.uint64)[:, None]
    key = np.array([word % 2**32, word >> 32], dtype=np.uint64)[:, None]
    first, second = philox(counter, key)[:, 0].reshape(2, 2).tolist()[at % 2]
    return -math.log((2 * ((first << 32 | second) >> 12) + 1) / 2**53)


@pytest.mark.parametrize("width", [1, 2, 7, 255, 256, 257, 1000, 70_000])
def test_numbers_are_those_of_their_columns_and_blocks(width: int) -> None:
    """Oracle: a word and a number at a time, with the logarithm of the library."""
    words = np.array([0, 2**64 - 1, 0x0123456789ABCDEF], dtype=np.uint64)
    columns, blocks = min(width, RACE_BLOCK), -(-width // RACE_BLOCK)
    found = arrivals(words, width)
    assert found.shape == (3, columns + blocks)
    places = [*range(columns), *(RACE_BLOCK + block for block in range(blocks))]
    wanted = [[plain(word, at) for at in places] for word in words.tolist()]
    np.testing.assert_allclose(found, wanted, rtol=2e-15)


@pytest.mark.parametrize("words, wanted", [((2**32 - 1,) * 4, 2.0**-53), ((0,) * 4, 53 * math.log(2))])
def test_the_ends_of_the_range_are_finite_and_above_zero(words: tuple[int, ...], wanted: float) -> None:
    """All bits of a word set: a share of 1 would arrive at 0, whatever its probability."""
    found = arrivals(
        np.zeros(1, dtype=np.uint64),
        2,
        lambda counters, _keys: np.repeat(np.array(words, dtype=np.uint64)[:, None], counters.shape[1], axis=1),
    )
    np.testing.assert_allclose(found, wanted, rtol=2e-15)


def test_numbers_are_exponential_and_independent_of_their_neighbours() -> None:
    """Kolmogorov-Smirnov; 1.95 / sqrt(n) is passed once in a thousand."""
    found = arrivals(np.random.default_rng(0).integers(0, 2**64, 400, dtype=np.uint64), 600)
    shares, num = np.sort(np.exp(-found).ravel()), found.size
    assert np.abs(shares - np.arange(1, num + 1) / num).max() < 1.95 / math.sqrt(num)
    for one, other in ((found[:, 1:], found[:, :-1]), (found[1:], found[:-1])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 4 / math.sqrt(num)
