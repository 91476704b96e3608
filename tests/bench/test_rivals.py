"""Who is compared with whom, and that luck is not counted."""

import random

import pytest

from faser.bench.rivals import against_rivals
from tests.bench.recorded_runs import run_of


def test_the_rival_of_a_round_is_the_best_of_the_other_rounds_in_its_run_of_this_one() -> None:
    rates = {"off": (10.0, 30.0, 10.0), "fixed:3": (20.0, 20.0, 20.0), "faser": (20.0, 21.0, 25.0)}
    runs = [run_of(name, rate, round_=at) for name, each in rates.items() for at, rate in enumerate(each)]
    (found,) = against_rivals(runs, "faser")
    # Without round 0, off and fixed:3 both have a median of 20: the first named of the two is kept.
    assert found.rivals == ("off", "fixed:3", "off")
    assert (found.lowest, found.ratio, found.highest) == (21 / 20, 20 / 10, 25 / 10)


def test_many_equal_policies_are_a_tie_though_one_of_them_always_wins() -> None:
    draw = random.Random(7)
    names = ("faser", "off", "goodput", "survival", "fixed:1", "fixed:3", "fixed:5", "fixed:7")
    runs = [run_of(name, 100 * draw.gauss(1, 0.1), round_=at) for at in range(400) for name in names]
    (found,) = against_rivals(runs, "faser")
    assert found.ratio == pytest.approx(1.0, abs=0.02)
    by_round = [max(each.tokens_per_s for each in runs if each.round == at) for at in range(400)]
    assert sorted(by_round)[200] > 112  # what the best of each round would make of it


def test_a_policy_that_was_left_out_of_later_rounds_is_nobodys_rival_there() -> None:
    runs = [run_of("slow", 90.0), run_of("off", 10.0), run_of("faser", 10.0)]
    runs += [run_of("off", 10.0, round_=1), run_of("faser", 11.0, round_=1)]
    (found,) = against_rivals(runs, "faser")
    assert found.rivals == ("off", "off")


def test_one_round_alone_chooses_no_rival() -> None:
    assert against_rivals([run_of("off", 10.0), run_of("faser", 10.0)], "faser") == []
