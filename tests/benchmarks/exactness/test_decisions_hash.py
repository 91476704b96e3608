"""Plans have one hash each time, and a decision that is changed has another one."""

import pytest

from benchmarks.exactness.decisions_hash import CONDITIONS, KINDS, Kind, compare, scenario_hash
from faser.engine.control.speculation.policies import Fixed

KIND: Kind = ("draft_model", "faser", None, 0.05, "serial")
CONDITION = (0.7, 8, 0.5, 0.0)


def test_there_are_936_scenarios() -> None:
    assert len(set(KINDS)) * len(set(CONDITIONS)) == 936


def test_a_scenario_has_the_same_hash_twice_and_every_condition_another_one() -> None:
    assert scenario_hash(KIND, CONDITION) == scenario_hash(KIND, CONDITION)
    assert len({scenario_hash(KIND, (0.7, load, 0.5, 0.0))[0] for load in (1, 8)}) == 2


def test_a_policy_that_drafts_one_token_less_is_seen() -> None:
    fixed: Kind = ("draft_model", "fixed", 3, 0.05, "serial")
    assert scenario_hash(fixed, CONDITION, Fixed(3)) == scenario_hash(fixed, CONDITION)
    three, two = scenario_hash(fixed, CONDITION), scenario_hash(fixed, CONDITION, Fixed(2))
    assert two[0] != three[0]
    assert two[1] > three[1]  # passes are cheap and 7 of 10 tokens are accepted


def test_a_comparison_counts_hashes_and_says_which_kind_became_faster(capsys: pytest.CaptureFixture[str]) -> None:
    before = {f"{kind} {condition}": ("same", 2.0) for kind in KINDS for condition in CONDITIONS}
    after = before | {f"{KINDS[0]} {CONDITIONS[0]}": ("other", 1.0)}
    assert compare(before, after) == 1
    first, *kinds = capsys.readouterr().out.splitlines()
    assert first.startswith("1 hashes differ")
    assert kinds[0].split()[:3] == ["1.000", "1.028", "2.000"]
    assert {tuple(line.split()[:3]) for line in kinds[1:]} == {("1.000", "1.000", "1.000")}
