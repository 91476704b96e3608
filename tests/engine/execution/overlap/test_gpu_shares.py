"""Shares that lanes are offered: those that a look through all sets of splits would find, on made-up devices."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest

from faser.engine.execution.overlap.gpu_shares import describe, shares_for
from faser.kernels.cuda.device_rates import DeviceRates, SplitRates
from tests.kernels.cuda.fake_rates import A100, H200, L4, Curve, linear

WORTH, KEPT = (1 / 8, 1 / 4, 1 / 2), 0.65


def drafts(rates: DeviceRates) -> list[int]:
    return [each.draft for each in shares_for(rates)]


@pytest.mark.parametrize(
    "curve, wanted",
    [
        (H200, [12, 20, 36]),
        (A100, [12, 20, 36]),
        (L4, [2, 10]),
    ],
)
def test_made_up_devices_are_divided_as_expected(curve: Curve, wanted: list[int]) -> None:
    """The H200's curve is what is assumed of it, not what was measured."""
    assert drafts(curve.rates()) == wanted


@pytest.mark.parametrize("bytes_each", [55e9, 60e9, 65e9, 70e9, 75e9])
def test_an_h200_has_the_same_shares_over_most_of_what_one_processor_may_move(bytes_each: float) -> None:
    curve = Curve(num_processors=132, bytes_each=bytes_each, bytes_most=4.3e12, operations_each=780e12 / 132)
    assert drafts(curve.rates())[:2] == [12, 20]
    assert drafts(curve.rates())[2:] == ([44] if bytes_each < 60e9 else [36])


@pytest.mark.parametrize("noise", [0.98, 0.99, 1.01, 1.02])
def test_a_split_that_leaves_two_thirds_to_the_digit_is_not_up_to_noise(noise: float) -> None:
    """Caught: a bound of two thirds."""
    rates = Curve(num_processors=132, bytes_each=50e9, bytes_most=4.3e12, operations_each=1e12).rates()
    splits = tuple(replace(each, operations_per_s=each.operations_per_s * noise) for each in rates.splits)
    assert drafts(replace(rates, splits=splits)) == [12, 28, 44]


def brute_force(rates: DeviceRates) -> tuple[SplitRates, ...]:
    """Of all sets of up to three splits: the one that reaches most, and then takes fewest processors.

    A worth is reached by a set with a draft lane that moves so much; verification has to keep its part in all.
    """
    allowed = [each for each in rates.splits if each.operations_per_s / rates.operations_per_s >= KEPT]
    most = max(each.operations_per_s for each in rates.splits)
    allowed = allowed or [each for each in rates.splits if each.operations_per_s == most][:1]

    def reached(one: SplitRates) -> set[float]:
        return {worth for worth in WORTH if one.bytes_per_s / rates.bytes_per_s >= worth}

    def taken(some: Sequence[SplitRates]) -> tuple[int, ...]:
        """For each worth, the fewest processors that reach it; all processors where none does."""
        return tuple(
            min((each.draft for each in some if worth in reached(each)), default=rates.num_processors)
            for worth in WORTH
        )

    some_sets = [some for size in (1, 2, 3) for some in combinations(allowed, size)]
    best = min(some_sets, key=lambda some: (taken(some), len(some), -some[-1].bytes_per_s))
    return tuple(sorted(best, key=lambda each: each.draft))


def random_rates(seed: int) -> DeviceRates:
    """Any device, with noise that may put a larger part below a smaller one."""
    draw = random.Random(seed)
    num_processors = draw.randint(9, 160)
    curve = Curve(
        num_processors=num_processors,
        bytes_each=1.0,
        bytes_most=num_processors * draw.uniform(0.1, 1.2),
        operations_each=draw.uniform(0.5, 2.0),
    )
    plain, noise = curve.rates(), draw.choice([0.0, 0.02, 0.3])
    splits = tuple(
        SplitRates(
            verify=each.verify,
            draft=each.draft,
            operations_per_s=each.operations_per_s * draw.uniform(1 - noise, 1 + noise),
            bytes_per_s=each.bytes_per_s * draw.uniform(1 - noise, 1 + noise),
        )
        for each in plain.splits
    )
    return DeviceRates(
        num_processors=num_processors,
        operations_per_s=plain.operations_per_s,
        bytes_per_s=plain.bytes_per_s,
        splits=splits,
    )


@pytest.mark.parametrize("seed", range(300))
def test_any_device_is_divided_as_a_look_through_all_sets_says(seed: int) -> None:
    rates = random_rates(seed)
    assert shares_for(rates) == brute_force(rates)


@pytest.mark.parametrize("seed", range(300))
def test_shares_are_few_and_verification_keeps_its_part_where_it_can(seed: int) -> None:
    rates = random_rates(seed)
    found = shares_for(rates)
    assert 1 <= len(found) <= 3
    assert [each.draft for each in found] == sorted({each.draft for each in found})
    assert set(found) <= set(rates.splits)
    keeps = [each.operations_per_s >= KEPT * rates.operations_per_s for each in found]
    assert all(keeps) or len(found) == 1


def test_a_device_of_few_processors_offers_one_share_rather_than_none() -> None:
    assert drafts(linear(16).rates()) == [8]  # verification keeps half, which is all there is
    assert drafts(linear(9).rates()) == [1]  # a ninth of the bytes, below any worth
    assert drafts(linear(24).rates()) == [8]


def test_where_no_draft_lane_moves_enough_the_one_that_moves_most_is_offered() -> None:
    """Verification keeps its part beside 4 and 12 processors only. Caught: the one that moves least."""
    plain = linear(132).rates()
    splits = tuple(
        replace(each, operations_per_s=each.operations_per_s * (1 if each.draft <= 12 else 0.5))
        for each in plain.splits
    )
    assert drafts(replace(plain, splits=splits)) == [12]


def test_shares_are_told_with_processors_and_rates() -> None:
    rates = H200.rates()
    assert describe(rates, shares_for(rates)) == (
        "draft 12 of 132 processors, 750 of 4300 GB/s, verify 120, 709 of 780 TFLOP/s; "
        "draft 20 of 132 processors, 1250 of 4300 GB/s, verify 112, 662 of 780 TFLOP/s; "
        "draft 36 of 132 processors, 2250 of 4300 GB/s, verify 96, 567 of 780 TFLOP/s"
    )
