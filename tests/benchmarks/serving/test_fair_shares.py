"""The comparison of fair shares, against small servers that answer at once."""

import argparse

import pytest

from benchmarks.serving.fair_shares import arm, compare
from tests.api.server import serving
from tests.fake_engine import FakeEngine


def test_arms_take_turns_and_each_has_its_medians() -> None:
    with serving(FakeEngine()) as before, serving(FakeEngine()) as now:
        arms = {"before": before, "now": now}
        found = compare(arms, keys=("a", "b"), rounds=2, num_prompts=5, max_tokens=2)
    assert {name: len(each) for name, each in found["arms"].items()} == {"before": 2, "now": 2}
    assert found["arms"]["now"][0]["alone"]["requests"] == 10
    expected = {"flood_s", "alone_p50_s", "alone_max_s", "during_p50_s", "during_max_s"}
    assert all(set(each) == expected for each in found["medians"].values())


def test_an_arm_is_a_name_and_a_url() -> None:
    assert arm("now=http://127.0.0.1:1") == ("now", "http://127.0.0.1:1")
    for text in ("http://127.0.0.1:1", "now", "=http://127.0.0.1:1", "now=8000"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be"):
            arm(text)
