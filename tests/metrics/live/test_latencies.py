"""Percentiles of latencies. Oracle: numpy's percentile over all values of the window."""

import numpy as np
import pytest

from faser.metrics.live.latencies import RESOLUTION, Latencies

SHARES = (0.5, 0.95, 0.99)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [1, 2, 19, 400])
def test_percentiles_are_those_of_the_window_within_the_resolution(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    latencies = Latencies(window=3)
    parts = [10 ** rng.uniform(-3.9, 3, count) for _ in range(7)]
    for part in parts:
        latencies.tick()
        for value in part:
            latencies.add(value)
    found_count, found = latencies.percentiles(SHARES)
    window = np.concatenate(parts[-3:])
    assert found_count == len(window)
    exact = np.percentile(window, [100 * each for each in SHARES], method="inverted_cdf")
    assert found == pytest.approx(exact, rel=RESOLUTION * 1.001)


def test_a_window_without_values_has_no_percentile() -> None:
    latencies = Latencies(window=2)
    assert latencies.percentiles(SHARES) == (0, [])
    latencies.add(0.5)
    assert latencies.percentiles(SHARES)[0] == 1
    for _ in range(2):
        latencies.tick()
    assert latencies.percentiles(SHARES) == (0, [])


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 1e9])
def test_a_value_outside_of_the_bins_counts_in_the_nearest(seconds: float) -> None:
    latencies = Latencies(window=2)
    latencies.add(seconds)
    assert latencies.percentiles((1.0,))[0] == 1
