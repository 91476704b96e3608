"""What estimates rest on, computed by whole arrays. Oracle: the same sums token by token, in plain numbers."""

import numpy as np
import pytest

from faser.engine.control.speculation.acceptance.estimator import Acceptance, Outcomes

CAP = 8
KEPT, ALL_KEPT = 0.5 ** (1 / 60), 0.5 ** (1 / 600)
PRIOR, PRIOR_MASS, SHRINK, LEAST, MOST = 0.7, 8.0, 20.0, 0.005, 0.995


@pytest.mark.parametrize("num_slots", [1, 6])
def test_survival_follows_from_the_outcomes_one_by_one(num_slots: int) -> None:
    """Few steps, all of them usual ones: nothing is taken to be out of date."""
    rng = np.random.default_rng(num_slots)
    acceptance = Acceptance(num_slots, CAP, method="draft_model", always_drafts=True)
    own = [[[0.0, 0.0] for _ in range(CAP)] for _ in range(num_slots)]
    all_slots = [[PRIOR_MASS, PRIOR_MASS * PRIOR] for _ in range(CAP)]
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
            _add(all_slots[depth], ALL_KEPT**judged_of_all, judged_of_all, good_of_all)
    found = acceptance.survival(slots)
    for slot in range(num_slots):
        assert found[slot] == pytest.approx(_survival(own[slot], all_slots), rel=1e-9)


def _add(pair: list[float], kept: float, judged: int, good: int) -> None:
    pair[0] = pair[0] * kept + judged
    pair[1] = pair[1] * kept + good


def _survival(own: list[list[float]], all_slots: list[list[float]]) -> list[float]:
    mean = sum(good for _, good in all_slots) / sum(judged for judged, _ in all_slots)
    usual = [
        min(max((good + PRIOR_MASS * mean) / (judged + PRIOR_MASS), LEAST), MOST) for judged, good in all_slots
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
