"""Ratios and differences of ways to run that took turns, with their intervals."""

import math

import pytest

from faser.cli.bench.estimates import difference, ratio, t_975


def _share_below(limit: float, freedom: int) -> float:
    """Of Student's distribution, by Simpson's rule over its density from 0 to the limit."""
    scale: float = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    steps = 20_000
    width = limit / steps
    weights = [1, *(4 if step % 2 else 2 for step in range(1, steps)), 1]
    heights: list[float] = [
        scale * (1 + (step * width) ** 2 / freedom) ** (-(freedom + 1) / 2) for step in range(steps + 1)
    ]
    return 0.5 + width / 3 * sum(weight * height for weight, height in zip(weights, heights, strict=True))


@pytest.mark.parametrize("freedom", [*range(1, 31)])
def test_97_5_percent_of_students_distribution_lie_below_t(freedom: int) -> None:
    assert _share_below(t_975(freedom), freedom) == pytest.approx(0.975, abs=5e-5)


def test_with_many_degrees_of_freedom_an_interval_is_too_wide_rather_than_too_narrow() -> None:
    assert _share_below(t_975(200), 200) > 0.975
    assert t_975(200) < 1.05 * 1.96


def test_a_ratio_is_the_geometric_mean_of_the_rounds_with_students_interval() -> None:
    found = ratio([2.0, 8.0, 4.0], [1.0, 1.0, 1.0])

    deviation = math.log(2)  # of log 2, log 8 and log 4 around log 4
    margin = 4.303 * deviation / math.sqrt(3)
    assert found.mean == pytest.approx(4.0)
    assert found.low == pytest.approx(4 * math.exp(-margin))
    assert found.high == pytest.approx(4 * math.exp(margin))
    assert found.rounds == 3


def test_swapping_the_arms_inverts_ratio_and_interval() -> None:
    mine, theirs = [1.0, 2.0, 5.0, 3.0], [2.0, 2.5, 4.0, 1.0]
    one, other = ratio(mine, theirs), ratio(theirs, mine)

    assert one.low is not None
    assert other.high is not None
    assert one.mean * other.mean == pytest.approx(1)
    assert one.low * other.high == pytest.approx(1)


def test_rounds_are_compared_with_themselves_so_a_slower_machine_is_no_slower_arm() -> None:
    found = ratio([10.0, 1.0, 100.0], [5.0, 0.5, 50.0])

    assert (found.low, found.mean, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_one_round_has_no_interval_and_none_no_ratio() -> None:
    assert (ratio([3.0], [2.0]).low, ratio([3.0], [2.0]).high) == (None, None)
    with pytest.raises(ValueError, match="no round"):
        ratio([], [])
    with pytest.raises(ValueError, match="shorter"):
        ratio([1.0, 2.0], [1.0])


def test_a_difference_is_the_mean_of_the_rounds_with_students_interval() -> None:
    found = difference([0.9, 0.8, 1.0], [0.8, 0.6, 0.7])

    assert found.mean == pytest.approx(0.2)
    assert found.low == pytest.approx(0.2 - 4.303 * 0.1 / math.sqrt(3))
    assert found.high == pytest.approx(0.2 + 4.303 * 0.1 / math.sqrt(3))


def test_an_estimate_names_its_interval_where_it_has_one() -> None:
    assert ratio([3.0], [2.0]).text(unit="x") == "1.50x"
    assert ratio([2.0, 2.0], [1.0, 1.0]).text(1, "x") == "2.0x (2.0 … 2.0)"
    assert ratio([2.0], [3.0]).rounded() == {"mean": 0.6667, "low": None, "high": None, "rounds": 1}
