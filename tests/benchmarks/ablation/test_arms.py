"""Arms take turns: every one once a repeat, in an order of its own."""

import pytest

from benchmarks.ablation.drive import ARMS, BASE, FLOOR, arms_named, orders
from faser.errors import ConfigError


def test_every_arm_has_its_turn_once_in_every_repeat() -> None:
    found = orders(ARMS, 40, seed=3)
    assert len(found) == 40
    assert all(sorted(arm.name for arm in order) == sorted(arm.name for arm in ARMS) for order in found)


def test_no_arm_always_comes_first_or_behind_the_same_other_one() -> None:
    found = orders(ARMS, 40, seed=3)
    for arm in ARMS:
        places = [order.index(arm) for order in found]
        assert len(set(places)) == len(ARMS)
        assert len({order[place - 1].name for order, place in zip(found, places, strict=True) if place}) > 2


def test_a_seed_gives_the_same_orders() -> None:
    assert orders(ARMS, 5, seed=1) == orders(ARMS, 5, seed=1) != orders(ARMS, 5, seed=2)


def test_arms_are_named_in_any_order_and_come_in_their_own() -> None:
    assert [arm.name for arm in arms_named(["+overlap", BASE, FLOOR])] == [FLOOR, BASE, "+overlap"]


def test_an_arm_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'\+magic'.*off, fixed:3, \+lengths"):
        arms_named([FLOOR, "+magic"])


def test_each_arm_is_the_one_before_with_one_thing_more() -> None:
    by_name = {arm.name: arm for arm in ARMS}
    lengths, overlap = (by_name[name] for name in ("+lengths", "+overlap"))
    assert (lengths.policy, lengths.overlap) == ("faser", "off")
    assert (overlap.policy, overlap.overlap) == ("faser", "auto")
