"""From which count on a drafted token is flagged. Oracles: a loop over all tokens; known chances of acceptance.

Planted bugs that these tests have caught: the raw share in place of the bound; a flag at count 0; layers that
share their counts; an edge of a band moved.
"""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from faser.engine.execution.pruning.calibration import MOST_FALSE, PruneCalibration, bands, upper_share

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MOST = 32


def uniform_tokens(count: int, rng: np.random.Generator, *, chance: float = 0.9) -> tuple[Ints, Bools]:
    """Counts, and acceptance that falls with them: chance at 0, e times less with every 3 more."""
    counts = rng.integers(0, MOST + 1, count)
    return counts, rng.random(count) < chance * np.exp(-counts / 3)


def bound(good: int, total: int) -> float:
    """Wilson's upper end at 99 %, by definition: the share whose own spread just reaches down to what was seen."""
    low, high = good / total, 1.0
    for _ in range(60):
        share = (low + high) / 2
        reaches = share - 2.326 * math.sqrt(share * (1 - share) / total) <= good / total
        low, high = (share, high) if reaches else (low, share)
    return low


@pytest.mark.parametrize("good, total", [(0, 10), (0, 133), (3, 200), (10, 10), (17, 900)])
def test_the_bound_is_wilsons(good: int, total: int) -> None:
    found = upper_share(np.array([float(good)]), np.array([float(total)]))
    assert found[0] == pytest.approx(bound(good, total), abs=1e-6)


def test_nothing_seen_bounds_nothing() -> None:
    assert upper_share(np.zeros(1), np.zeros(1)) == [1.0]


def test_bands_end_at_zero_and_a_half() -> None:
    assert bands(np.array([0.0, 1e-3, 0.5, 0.51, 2.0])).tolist() == [0, 1, 1, 2, 2]


def test_thresholds_are_the_smallest_counts_that_a_loop_finds() -> None:
    rng = np.random.default_rng(1)
    calibration = PruneCalibration(2, MOST)
    counts, accepted = uniform_tokens(3000, rng)
    calibration.add(0, np.full(3000, 0.8), counts, accepted)
    allowed = []
    for least in range(1, MOST + 1):
        flagged = [good for count, good in zip(counts.tolist(), accepted.tolist(), strict=True) if count >= least]
        if flagged and bound(sum(flagged), len(flagged)) <= MOST_FALSE:
            allowed.append(least)
    assert calibration.thresholds(0, np.array([0.8, 0.0, 0.4])).tolist() == [allowed[0], MOST + 1, MOST + 1]
    assert 3 < allowed[0] < 20
    assert calibration.usable.tolist() == [True, False]
    assert calibration.false_shares[0] <= MOST_FALSE
    assert calibration.false_shares[1] == 1.0


def test_layers_learn_apart() -> None:
    calibration = PruneCalibration(2, MOST)
    for layer, count in ((0, 9), (1, 4)):
        calibration.add(layer, np.zeros(500), np.full(500, count), np.zeros(500, dtype=np.bool_))
        calibration.add(layer, np.zeros(500), np.full(500, count - 1), np.ones(500, dtype=np.bool_))
    assert [int(calibration.thresholds(layer, np.zeros(1))[0]) for layer in (0, 1)] == [9, 4]


@pytest.mark.parametrize("refused, usable", [(265, False), (266, True)])
def test_less_than_266_refused_tokens_flag_nothing(refused: int, usable: bool) -> None:
    calibration = PruneCalibration(1, MOST)
    calibration.add(0, np.zeros(refused), np.full(refused, MOST), np.zeros(refused, dtype=np.bool_))
    assert bool(calibration.usable[0]) is usable


def test_a_token_that_nothing_beats_is_never_flagged() -> None:
    calibration = PruneCalibration(1, MOST)
    calibration.add(0, np.zeros(500), np.zeros(500, dtype=np.int64), np.zeros(500, dtype=np.bool_))
    assert calibration.thresholds(0, np.zeros(1)).tolist() == [MOST + 1]
    calibration.add(0, np.zeros(500), np.ones(500, dtype=np.int64), np.zeros(500, dtype=np.bool_))
    assert calibration.thresholds(0, np.zeros(1)).tolist() == [1]


@pytest.mark.parametrize("seed", range(5))
def test_no_more_of_the_flagged_tokens_are_right_than_promised(seed: int) -> None:
    """Oracle: the chances that the tokens were drawn with. Every threshold that was in force is checked."""
    rng = np.random.default_rng(seed)
    calibration = PruneCalibration(1, MOST)
    chances = 0.9 * np.exp(-np.arange(MOST + 1) / 3)
    worst = []
    for _ in range(200):
        counts, accepted = uniform_tokens(20, rng)
        calibration.add(0, np.zeros(20), counts, accepted)
        threshold = int(calibration.thresholds(0, np.zeros(1))[0])
        if threshold <= MOST:
            worst.append(chances[threshold:].mean())
    assert len(worst) > 100
    assert np.mean(np.array(worst) > MOST_FALSE) < 0.1


def test_what_was_seen_long_ago_is_forgotten() -> None:
    """200,000 tokens of count 5 were refused; then 2,000 are accepted, which is enough."""
    calibration = PruneCalibration(1, MOST)
    both = np.tile([5, 20], 10_000)
    for _ in range(20):
        calibration.add(0, np.zeros(20_000), both, np.zeros(20_000, dtype=np.bool_))
    assert calibration.thresholds(0, np.zeros(1)).tolist() == [1]
    for _ in range(40):
        calibration.add(0, np.zeros(50), np.full(50, 5), np.ones(50, dtype=np.bool_))
    assert calibration.thresholds(0, np.zeros(1)).tolist() == [6]
    for _ in range(40):
        calibration.add(0, np.zeros(10_000), both[:10_000], np.zeros(10_000, dtype=np.bool_))
    assert calibration.thresholds(0, np.zeros(1)).tolist() == [1]
