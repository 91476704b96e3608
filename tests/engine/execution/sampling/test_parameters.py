"""The random numbers: known answers, a plain reimplementation, and simple statistics."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from faser.engine.execution.sampling.parameters import Purpose, noise_words, uniforms
from faser.kernels.interface.sampling import philox

NUM_DRAWS = 100_000


def column(*words: int) -> NDArray[np.uint64]:
    return np.array(words, dtype=np.uint64)[:, None]


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """One counter, ten rounds, Python integers."""
    a, b, c, d = counter
    left, right = key
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (
            (second >> 32) ^ b ^ left,
            second & 0xFFFFFFFF,
            (first >> 32) ^ d ^ right,
            first & 0xFFFFFFFF,
        )
        left, right = (left + 0x9E3779B9) & 0xFFFFFFFF, (right + 0xBB67AE85) & 0xFFFFFFFF
    return [a, b, c, d]


@pytest.mark.parametrize(
    "counter, key, words",
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_generator_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    assert philox(column(*counter), column(*key))[:, 0].tolist() == list(words)


def test_the_generator_over_many_rows_equals_one_counter_at_a_time() -> None:
    rng = np.random.default_rng(1)
    counters = rng.integers(0, 2**32, (4, 50), dtype=np.uint64)
    keys = rng.integers(0, 2**32, (2, 50), dtype=np.uint64)

    words = philox(counters, keys)

    for row in range(50):
        assert words[:, row].tolist() == plain_philox(counters[:, row].tolist(), keys[:, row].tolist())


def draws(seed: int, purpose: Purpose = Purpose.TOKEN) -> NDArray[np.float64]:
    return uniforms(noise_words(np.full(NUM_DRAWS, seed, dtype=np.uint64), np.arange(NUM_DRAWS), purpose))


def test_the_numbers_are_spread_evenly_over_zero_to_one() -> None:
    """Kolmogorov-Smirnov against the uniform law; 1.95 / sqrt(n) is passed once in a thousand."""
    found = np.sort(draws(seed=7))
    ranks = np.arange(1, NUM_DRAWS + 1) / NUM_DRAWS

    assert found[0] >= 0.0
    assert found[-1] < 1.0
    assert np.abs(found - ranks).max() < 1.95 / math.sqrt(NUM_DRAWS)


def correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    return float(np.corrcoef(one, other)[0, 1])


def test_neighbouring_positions_seeds_and_purposes_do_not_correlate() -> None:
    bound = 4 / math.sqrt(NUM_DRAWS)
    found = draws(seed=7)

    assert abs(correlation(found[1:], found[:-1])) < bound
    assert abs(correlation(found, draws(seed=8))) < bound
    assert abs(correlation(found, draws(seed=7 + 2**32))) < bound
    for purpose in (Purpose.ACCEPT, Purpose.REPLACE, Purpose.DRAFT):
        assert abs(correlation(found, draws(7, purpose))) < bound


def test_pairs_of_neighbouring_positions_fill_the_square_evenly() -> None:
    """Chi-square over 20 by 20 cells: 399 degrees of freedom, standard deviation 28."""
    found = draws(seed=11)
    cells, _, _ = np.histogram2d(found[0::2], found[1::2], bins=20, range=[[0, 1], [0, 1]])
    expected = NUM_DRAWS / 2 / 400

    assert abs(((cells - expected) ** 2 / expected).sum() - 399) < 4 * 28.3


def test_a_word_depends_on_its_own_row_only() -> None:
    seeds = np.array([3, 2**63 + 5, 0, 3], dtype=np.uint64)
    positions = np.array([0, 2**33 + 1, 9, 9])

    together = noise_words(seeds, positions, Purpose.TOKEN)

    alone = [noise_words(seeds[i : i + 1], positions[i : i + 1], Purpose.TOKEN)[0] for i in range(4)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4
    assert together[1] != noise_words(seeds[1:2], positions[1:2] - 2**33, Purpose.TOKEN)[0]


def test_a_position_drafted_again_gets_a_word_of_its_own() -> None:
    seeds = np.full(4, 7, dtype=np.uint64)
    positions = np.full(4, 12)

    found = noise_words(seeds, positions, Purpose.DRAFT, np.array([9, 10, 12, 9]))

    assert found[0] == found[3]
    assert len({*found.tolist(), *noise_words(seeds[:1], positions[:1], Purpose.DRAFT).tolist()}) == 4
