"""The curve's Newton step. Oracle: the library's solver, and a curve learnt token by token from a known truth."""

import numpy as np
import pytest

from faser.config.drafters import DRAFTERS
from faser.engine.control.speculation.acceptance.calibration import LogisticCurve


def library_weights(features: list[list[float]], good: list[bool]) -> tuple[float, float]:
    """Line of a fresh curve's first step, by numpy: prior curvature as the module has it."""
    intercept, slope, centre = np.log(0.7 / 0.3) - 0.5 * 2.5, 0.5, 2.5
    weights, rows = np.array([intercept, slope, 0.0]), np.array(features)
    chances = 1 / (1 + np.exp(-rows @ weights))
    spread = np.array([[1.0, centre, 0.0], [centre, centre**2, 0.0], [0.0, 0.0, 0.0]])
    curvature = (rows * (chances * (1 - chances))[:, None]).T @ rows + 2.0 * spread + np.diag([0.02, 4.0, 40.0])
    move = np.linalg.solve(curvature, (np.array(good) - chances) @ rows)
    weights = weights + move * min(1.0, 1.0 / np.abs(rows @ move).max())
    depth = rows[:, 2].sum() * 8 / (len(rows) + 1e-9)
    return float(weights[0] + weights[2] * depth / 8), float(weights[1])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("count", [1, 3, 200])
def test_one_step_is_the_one_that_the_library_would_take(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    depths, confidences = rng.integers(0, 6, count), rng.normal(2, 2, count)
    good = rng.random(count) < 0.5
    curve = LogisticCurve(DRAFTERS["draft_model"])
    features = curve.features(confidences, depths)
    curve.learn(features, good, np.zeros(count))
    assert curve.line() == pytest.approx(library_weights(features.tolist(), good.tolist()), rel=1e-9)


def test_logits_follow_the_weights_at_once() -> None:
    rng = np.random.default_rng(0)
    curve, confidences = LogisticCurve(DRAFTERS["draft_model"]), np.full((1, 3), 2.0)
    before = curve.logits(confidences)
    features = curve.features(rng.normal(2, 2, 50), np.zeros(50, dtype=np.int64))
    curve.learn(features, np.zeros(50, dtype=np.bool_), np.zeros(50))
    assert (curve.logits(confidences) < before).all()
    assert curve.logits(np.full((2, 5), 2.0)).shape == (2, 5)
