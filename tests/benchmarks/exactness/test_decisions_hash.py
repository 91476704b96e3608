"""Plans have one hash each time, and a decision that is changed has another one."""

from benchmarks.exactness.decisions_hash import CONDITIONS, KINDS, Kind, scenario_hash
from faser.engine.control.speculation.policies import Fixed

KIND: Kind = ("draft_model", "faser", None, 0.05, "serial")
CONDITION = (0.7, 8, 0.5, 0.0)


def test_there_are_936_scenarios() -> None:
    assert len(set(KINDS)) * len(set(CONDITIONS)) == 936


def test_a_scenario_has_the_same_hash_twice_and_every_condition_another_one() -> None:
    assert scenario_hash(KIND, CONDITION) == scenario_hash(KIND, CONDITION)
    assert len({scenario_hash(KIND, (0.7, load, 0.5, 0.0)) for load in (1, 8)}) == 2


def test_a_policy_that_drafts_one_token_less_is_seen() -> None:
    fixed: Kind = ("draft_model", "fixed", 3, 0.05, "serial")
    assert scenario_hash(fixed, CONDITION, Fixed(3)) == scenario_hash(fixed, CONDITION)
    assert scenario_hash(fixed, CONDITION, Fixed(2)) != scenario_hash(fixed, CONDITION)
