"""What decisions rest on, computed by whole arrays. Oracle: the same sums token by token, in plain numbers."""

import numpy as np
import pytest

from faser.engine.contract.step_times import CostTable, Role
from faser.engine.control.speculation.acceptance.estimator import Acceptance, Outcomes
from faser.engine.control.speculation.policies.objective import Objective
from faser.engine.control.speculation.policies.policy import Candidates
from faser.engine.control.timing.cost_model import CostModel

CAP = 8
KEPT, ALL_KEPT = 0.5 ** (1 / 60), 0.5 ** (1 / 600)
PRIOR, PRIOR_MASS, SHRINK, LEAST, MOST = 0.7, 8.0, 20.0, 0.005, 0.995
STEP = CostTable(rows=(1, 16, 64, 256), seconds=(0.02, 0.021, 0.03, 0.09), kv_token_s=1e-6)


@pytest.mark.parametrize("count, other_rows, other_sequences", [(1, 0, 0), (5, 3, 3), (5, 70, 2)])
def test_a_steps_times_are_those_of_the_cost_model(count: int, other_rows: int, other_sequences: int) -> None:
    costs = CostModel({Role.STEP: STEP})
    costs.observe(Role.STEP, 1.0, 1.3)
    candidates = Candidates(
        slots=np.arange(count),
        limit=np.full(count, CAP),
        survival=np.ones((count, CAP + 1)),
        weight=np.full(count, 2.0),
        missing_kv=np.zeros(count, dtype=np.int64),
        other_rows=other_rows,
        other_sequences=other_sequences,
        kv_tokens=1000,
    )
    objective = Objective(costs, candidates)
    rows, most = count + other_rows, count * CAP
    plain_s = costs.step_s(count + other_sequences, 1000)
    expected = [plain_s + costs.step_s(rows + n, 1000) - costs.step_s(rows, 1000) for n in range(most + 1)]
    assert objective.worth == 2.0 * count + other_sequences
    assert objective.seconds_without_drafts == plain_s
    assert objective.verify_upto_s(most) == pytest.approx(expected)
    assert objective.verify_s(np.arange(most + 1)) == pytest.approx(expected)
    row_s = (costs.step_s(rows + most + count, 1000) - costs.step_s(rows + 1, 1000)) / (most + count - 1)
    assert objective.row_s(1, most + count) == pytest.approx(row_s)


@pytest.mark.parametrize("num_slots", [1, 6])
def test_survival_follows_from_the_verdicts_one_by_one(num_slots: int) -> None:
    """Few steps, all of them usual ones: nothing is taken to be out of date."""
    rng = np.random.default_rng(num_slots)
    acceptance = Acceptance(num_slots, CAP, method="draft_model", always_drafts=True)
    own = [[[0.0, 0.0] for _ in range(CAP)] for _ in range(num_slots)]
    everybody = [[PRIOR_MASS, PRIOR_MASS * PRIOR] for _ in range(CAP)]
    slots = np.arange(num_slots)
    for _ in range(8):
        drafted = rng.integers(1, CAP + 1, num_slots)
        accepted = np.minimum((rng.random((num_slots, CAP)) < PRIOR).cumprod(axis=1).sum(axis=1), drafted)
        acceptance.learn(
            Outcomes(
                slots=slots,
                methods=np.zeros_like(slots),
                drafted=drafted,
                verified=drafted,
                accepted=accepted,
                confidences=np.full((num_slots, CAP), 2.0),
            )
        )
        for depth in range(CAP):
            judged = [int(depth < min(a + 1, d)) for a, d in zip(accepted, drafted, strict=True)]
            good = [int(depth < a) for a in accepted]
            for slot in range(num_slots):
                kept = KEPT if judged[slot] else 1.0
                _add(own[slot][depth], kept, judged[slot], good[slot])
        for depth in range(CAP):
            judged_of_all = sum(int(depth < min(a + 1, d)) for a, d in zip(accepted, drafted, strict=True))
            good_of_all = sum(int(depth < a) for a in accepted)
            _add(everybody[depth], ALL_KEPT**judged_of_all, judged_of_all, good_of_all)
    found = acceptance.survival(slots)
    for slot in range(num_slots):
        assert found[slot] == pytest.approx(_survival(own[slot], everybody), rel=1e-9)


def _add(pair: list[float], kept: float, judged: int, good: int) -> None:
    pair[0] = pair[0] * kept + judged
    pair[1] = pair[1] * kept + good


def _survival(own: list[list[float]], everybody: list[list[float]]) -> list[float]:
    mean = sum(good for _, good in everybody) / sum(judged for judged, _ in everybody)
    usual = [
        min(max((good + PRIOR_MASS * mean) / (judged + PRIOR_MASS), LEAST), MOST) for judged, good in everybody
    ]
    spread = SHRINK * sum(usual) / CAP
    mass = SHRINK + sum(judged for judged, _ in own)
    expected = spread + sum(judged * chance for (judged, _), chance in zip(own, usual, strict=True))
    brought = spread + sum(good for _, good in own)
    odds = brought * (mass - expected) / (expected * (mass - brought))
    found = [1.0]
    for (judged, good), chance in zip(own, usual, strict=True):
        moved = odds / ((1 - chance) / chance + odds)
        found.append(found[-1] * min(max((good + SHRINK * moved) / (judged + SHRINK), LEAST), MOST))
    return found
