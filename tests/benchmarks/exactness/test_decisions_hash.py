"""Plans have one hash each time, and a decision that is changed has another one."""

import pytest

from benchmarks.exactness.decisions_hash import CONDITIONS, KINDS, scenario_hash
from faser.engine.contract.drafts import Ints
from faser.engine.control.speculation.faser_policy import Faser
from faser.engine.control.speculation.policy import Candidates

KIND, CONDITION = ("draft_model", "faser", None, 0.05, "serial"), (0.7, 8, 0.5, 0.0)


def test_there_are_936_scenarios() -> None:
    assert len(set(KINDS)) * len(set(CONDITIONS)) == 936


def test_a_scenario_has_the_same_hash_twice_and_every_condition_another_one() -> None:
    assert scenario_hash(KIND, CONDITION) == scenario_hash(KIND, CONDITION)
    assert len({scenario_hash(KIND, (0.7, load, 0.5, 0.0)) for load in (1, 8)}) == 2


def test_a_policy_that_verifies_one_token_less_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before, keep = scenario_hash(KIND, CONDITION), Faser.keep

    def one_less(policy: Faser, candidates: Candidates, lengths: Ints) -> Ints:
        kept = keep(policy, candidates, lengths)
        return kept - (kept > 3)

    monkeypatch.setattr(Faser, "keep", one_less)
    assert scenario_hash(KIND, CONDITION) != before
