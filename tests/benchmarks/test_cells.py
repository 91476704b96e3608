"""Values of arms over rounds: a cell's ratios, spreads, times."""

import pytest

from benchmarks.cells import Cell, Spread, Times


def test_a_cell_compares_the_arms_of_the_same_round() -> None:
    cell = Cell(labels={"requests": 4}, runs={"mine": [2.0, 8.0, 4.0], "off": [1.0, 4.0, 2.0]})

    assert cell.median("mine", float) == 4.0
    assert cell.ratio("mine", "off", float).mean == pytest.approx(2.0)


def test_a_spread_is_the_median_between_the_least_and_the_greatest() -> None:
    assert Spread.of([3.0, 1.0, 10.0]) == Spread(median=3.0, low=1.0, high=10.0)
    assert Spread.of([3.0]).text(1, "x") == "3.0x (3.0 … 3.0)"


def test_times_are_milliseconds_and_zero_where_nothing_was_timed() -> None:
    assert Times.of([0.1, 0.3]).mean_ms == pytest.approx(200.0)
    assert Times.of([]) == Times(mean_ms=0.0, p50_ms=0.0, p99_ms=0.0)
