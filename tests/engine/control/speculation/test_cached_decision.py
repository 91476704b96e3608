"""For how long a decision stands, and when the verdicts of its steps are taken in."""

import numpy as np
import pytest

from faser.engine.control.speculation.acceptance.estimator import Acceptance, Outcomes
from faser.engine.control.speculation.cached_decision import CachedDecision, DecisionCache
from faser.engine.control.speculation.policies.policy import Candidates

SLOTS, CAP = 80, 3


def candidates_of(count: int) -> Candidates:
    return Candidates(
        slots=np.arange(count),
        limit=np.full(count, CAP),
        survival=np.linspace(1, 0.2, CAP + 1) ** np.linspace(1, 2, count)[:, None],
        weight=np.ones(count),
        lag=np.zeros(count, dtype=np.int64),
        other_rows=0,
        kv_tokens=count,
    )


def outcomes_of(slots: range) -> Outcomes:
    count = len(slots)
    return Outcomes(
        slots=np.array(slots),
        methods=np.zeros(count, dtype=np.int64),
        drafted=np.full(count, 2),
        verified=np.full(count, 2),
        accepted=np.zeros(count, dtype=np.int64),
        confidences=np.ones((count, CAP)),
    )


def standing_of() -> tuple[DecisionCache, Acceptance]:
    acceptance = Acceptance(SLOTS, CAP, method="draft_model", always_drafts=True)
    return DecisionCache(acceptance, SLOTS, CAP), acceptance


def kept_steps(standing: DecisionCache, count: int) -> list[CachedDecision]:
    """A decision for count sequences, and what holds for the steps behind it."""
    assert standing.next(count, is_due=False) is None
    standing.keep(candidates_of(count), np.arange(count) % (CAP + 1), None, count)
    found = []
    while (decision := standing.next(count, is_due=False)) is not None:
        found.append(decision)
    return found


@pytest.mark.parametrize("count, steps", [(1, 0), (15, 0), (16, 1), (40, 2), (48, 3), (64, 3)])
def test_the_more_sequences_the_longer_a_decision_stands(count: int, steps: int) -> None:
    assert len(kept_steps(standing_of()[0], count)) == steps


def test_a_standing_decision_is_the_one_that_was_made() -> None:
    decision = kept_steps(standing_of()[0], 32)[0]
    assert decision.lengths[:32].tolist() == [i % (CAP + 1) for i in range(32)]
    assert (decision.survival[:32] == candidates_of(32).survival).all()
    assert decision.usual == round(sum(i % (CAP + 1) for i in range(32)) / 32)
    assert set(decision.lengths[32:].tolist()) == {decision.usual}


def test_who_comes_later_drafts_what_is_usual() -> None:
    standing, _ = standing_of()
    standing.keep(candidates_of(32), np.full(32, 3), None, 32)
    standing.start(5)
    standing.start(40)
    decision = standing.next(33, is_due=False)
    assert decision is not None
    assert decision.lengths[[5, 40]].tolist() == [3, 3]


@pytest.mark.parametrize("count, stands", [(32, True), (34, True), (30, False), (40, False)])
def test_a_decision_falls_when_many_came_or_went(count: int, stands: bool) -> None:
    standing, _ = standing_of()
    standing.keep(candidates_of(32), np.full(32, 3), None, 32)
    assert (standing.next(count, is_due=False) is not None) == stands


def test_a_decision_falls_when_another_is_due_anyway() -> None:
    standing, _ = standing_of()
    standing.keep(candidates_of(32), np.full(32, 3), None, 32)
    assert standing.next(32, is_due=True) is None


def test_verdicts_wait_for_the_end_of_a_decision() -> None:
    standing, acceptance = standing_of()
    standing.keep(candidates_of(32), np.full(32, 3), None, 32)
    before = acceptance.survival(np.arange(32))
    standing.collect(outcomes_of(range(32)))
    assert (acceptance.survival(np.arange(32)) == before).all()
    standing.take_lessons()
    assert (acceptance.survival(np.arange(32))[:, 1] < before[:, 1]).all()


def test_without_a_standing_decision_verdicts_are_taken_in_at_once() -> None:
    standing, acceptance = standing_of()
    before = acceptance.survival(np.arange(4))
    standing.collect(outcomes_of(range(4)))
    assert (acceptance.survival(np.arange(4))[:, 1] < before[:, 1]).all()


def test_what_a_sequence_that_left_would_have_taught_is_lost() -> None:
    standing, acceptance = standing_of()
    standing.keep(candidates_of(32), np.full(32, 3), None, 32)
    standing.collect(outcomes_of(range(2)))
    standing.release(1)
    standing.take_lessons()
    alone = Acceptance(SLOTS, CAP, method="draft_model", always_drafts=True)
    alone.learn(outcomes_of(range(1)))
    assert np.allclose(acceptance.survival(np.arange(2)), alone.survival(np.arange(2)))
