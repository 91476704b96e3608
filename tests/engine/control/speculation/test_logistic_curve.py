"""The curve's Newton step. Oracles: the library's solver; twins that were given less.

Planted bugs that these tests have caught: tokens that do not teach are part of the step; residuals are those after
the step; the step is not limited; the slope may become negative.
"""

import numpy as np
import pytest

from faser.config.speculation import DRAFTERS
from faser.types.arrays import Bools, Floats
from tests.engine.control.speculation.python_acceptance import PythonCurve


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
    curve = PythonCurve(DRAFTERS["draft_model"])
    features = curve.features(confidences, depths)
    curve.learn(features, good, np.zeros(count))
    assert curve.line() == pytest.approx(library_weights(features.tolist(), good.tolist()), rel=1e-9)


def test_logits_follow_the_weights_at_once() -> None:
    rng = np.random.default_rng(0)
    curve, confidences = PythonCurve(DRAFTERS["draft_model"]), np.full((1, 3), 2.0)
    before = curve.logits(confidences)
    features = curve.features(rng.normal(2, 2, 50), np.zeros(50, dtype=np.int64))
    curve.learn(features, np.zeros(50, dtype=np.bool_), np.zeros(50))
    assert (curve.logits(confidences) < before).all()
    assert curve.logits(np.full((2, 5), 2.0)).shape == (2, 5)


def lesson(rng: np.random.Generator, curve: PythonCurve, count: int) -> tuple[Floats, Bools, Floats]:
    """Features, outcomes and offsets of random tokens."""
    features = curve.features(rng.normal(2, 2, count), rng.integers(0, 6, count))
    return features, rng.random(count) < 0.5, rng.normal(0, 1, count)


def test_tokens_that_do_not_teach_are_predicted_and_nothing_else() -> None:
    rng = np.random.default_rng(3)
    all_tokens, some = PythonCurve(DRAFTERS["draft_model"]), PythonCurve(DRAFTERS["draft_model"])
    for _ in range(20):
        features, good, offsets = lesson(rng, all_tokens, 12)
        teaching = rng.random(12) < 0.6
        missed, spread = all_tokens.learn(features, good, offsets, teaching)
        taught = some.learn(features[teaching], good[teaching], offsets[teaching])
        assert all_tokens.line() == some.line()
        assert missed[teaching].tolist() == taught[0].tolist()
        assert spread[teaching].tolist() == taught[1].tolist()
        assert len(missed) == len(spread) == 12
    before = all_tokens.line()
    features, good, offsets = lesson(rng, all_tokens, 5)
    all_tokens.learn(features, good, offsets, np.zeros(5, dtype=np.bool_))
    assert all_tokens.line() == before


def test_residuals_are_those_of_the_prediction_before_the_step_with_the_offsets() -> None:
    rng = np.random.default_rng(5)
    curve = PythonCurve(DRAFTERS["draft_model"])
    for _ in range(10):
        margins, good, offsets = rng.normal(2, 2, 3), rng.random(3) < 0.5, rng.normal(0, 1, 3)
        logits = curve.logits(np.repeat(margins[:, None], 2, axis=1))[:, 1] + offsets
        chances = 1 / (1 + np.exp(-logits))
        missed, spread = curve.learn(curve.features(margins, np.ones(3, dtype=np.int64)), good, offsets)
        assert missed == pytest.approx(good - chances)
        assert spread == pytest.approx(chances * (1 - chances))


def test_one_odd_step_moves_no_token_by_more_than_a_logit_and_more_confidence_never_means_less() -> None:
    curve, depths = PythonCurve(DRAFTERS["draft_model"]), np.zeros(400, dtype=np.int64)
    confidences = np.linspace(0, 10, 400)
    inverted = confidences < 5  # confident tokens are refused, others are accepted
    offsets = np.zeros(400)
    before = curve.logits(confidences[:, None])
    curve.learn(curve.features(confidences, depths), inverted, offsets)
    assert np.abs(curve.logits(confidences[:, None]) - before).max() == pytest.approx(1.0)
    for _ in range(20):
        curve.learn(curve.features(confidences, depths), inverted, offsets)
        assert curve.line()[1] >= 0
    assert (np.diff(curve.logits(confidences[:, None])[:, 0]) >= 0).all()


def test_what_was_learnt_long_ago_is_outweighed() -> None:
    rng = np.random.default_rng(6)
    curve = PythonCurve(DRAFTERS["suffix"])
    for rate in (0.95, 0.3):
        for _ in range(150):
            confidences = rng.uniform(0.3, 0.7, 20)
            features = curve.features(confidences, np.zeros(20, dtype=np.int64))
            curve.learn(features, rng.random(20) < rate, np.zeros(20))
        assert 1 / (1 + np.exp(-curve.logits(np.array([[0.5]])).item())) == pytest.approx(rate, abs=0.06)
