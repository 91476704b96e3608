"""LogisticCurve: the chance that a draft token is accepted, given its confidence and its depth."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from faser.config.speculation import Confidence, DrafterInfo
from faser.engine.contract.drafts import Floats, Ints

CURVE_KEPT = 0.5 ** (1 / 400)  # of the curvature after one more decided token
_PRIOR_CURVATURE = (2.0, 4.0, 40.0)  # intercept, slope, depth: how firmly each is believed before any data
_LEAST_CURVATURE = 0.02
DEPTH_SCALE = 1 / 8
LONGEST_STEP = 1.0  # logits: one odd step must not move the curve further
LARGEST_MARGIN = 12.0
EDGE = 0.01
_ONE = np.array(1.0)
_SHAPES = ((3,), (3, 3), (3, 3), (2,))


class CurveMemory(NamedTuple):
    """Memory of a curve: [3], [3, 3], [3, 3]; depths: [2] sum and count of those it has seen. Written in place."""

    weights: Floats
    curvature: Floats
    prior_curvature: Floats
    depths: Floats


class LogisticCurve:
    """The chance that a draft token is accepted, given the drafter's confidence and the token's depth.

    logit of acceptance = w · (1, feature of the confidence, depth / 8). Online logistic regression learns w: every
    step makes one Newton step on the log likelihood of its tokens, against the decayed curvature of all earlier
    tokens: an extended Kalman filter without process noise but with forgetting.

    drafter: its kind of confidence chooses the feature: a margin in nats as it is, the logit of a probability, the
    logarithm of a match's length. Its priors hold before any data. memory: None makes its own.
    """

    def __init__(self, drafter: DrafterInfo, memory: CurveMemory | None = None) -> None:
        self._confidence = drafter.confidence
        self._memory = memory or CurveMemory(*(np.zeros(shape) for shape in _SHAPES))
        self._weights, self._curvature, self._prior_curvature, self._depths = self._memory
        prior, slope, centre = drafter.prior_acceptance, drafter.prior_slope, drafter.prior_centre
        self._prior = (math.log(prior / (1 - prior)) - slope * centre, slope, 0.0)
        spread = np.array([[1.0, centre, 0.0], [centre, centre**2, 0.0], [0.0, 0.0, 0.0]])
        spread *= _PRIOR_CURVATURE[0]
        self._prior_curvature[:] = spread + np.diag([_LEAST_CURVATURE, *_PRIOR_CURVATURE[1:]])
        self.forget()

    def forget(self) -> None:
        """Start over from the priors."""
        self._weights[:] = self._prior
        self._curvature[:] = 0.0
        self._depths[:] = 0.0, 1e-9

    def features(self, confidences: Floats, depths: Ints) -> Floats:
        """Return the features [T, 3] of T tokens; depths count from 0."""
        found = np.empty((len(confidences), 3))
        found[:, 0] = 1.0
        found[:, 1] = self._feature(confidences)
        found[:, 2] = depths * DEPTH_SCALE
        return found

    def logits(self, confidences: Floats) -> Floats:
        """Return the logits [S, K] of acceptance of tokens at depth 0 … K - 1."""
        intercept, slope, fall = self._weights.tolist()
        found: Floats = self._feature(confidences) * slope
        found += DEPTH_SCALE * np.arange(found.shape[1], dtype=np.float64) * fall + intercept
        return found

    def line(self) -> tuple[float, float]:
        """(intercept, slope) over the confidence itself, at the mean depth. For margins only."""
        intercept, slope, fall = self._weights.tolist()
        depth_sum, depth_count = self._depths.tolist()
        return intercept + fall * DEPTH_SCALE * depth_sum / depth_count, slope

    def learn(
        self,
        features: Floats,
        good: NDArray[np.bool_],
        offsets: Floats,
        teaching: NDArray[np.bool_] | None = None,
    ) -> tuple[Floats, Floats]:
        """Learn T decided tokens. offsets: [T] logits of their sequences, which the curve does not explain.

        teaching: [T] tokens to learn from; None: all. Returns, for all, [T] outcome minus its chance as predicted
        before, and the variance of this.
        """
        logits = features.dot(self._weights)
        logits += offsets
        chances = sigmoid(logits)
        missed = good - chances
        spread = chances * (_ONE - chances)
        if teaching is None:
            self._fit(features, missed, spread)
        elif np.count_nonzero(teaching):
            self._fit(features[teaching], missed[teaching], spread[teaching])
        return missed, spread

    def _fit(self, features: Floats, missed: Floats, spread: Floats) -> None:
        """One Newton step. missed: [T] outcome minus its predicted chance; spread: [T] the variance of this."""
        kept = CURVE_KEPT ** len(missed)
        self._curvature *= kept
        self._curvature += (features.T * spread).dot(features)
        curvature = self._curvature + self._prior_curvature
        move = np.array(_solved(curvature.tolist(), missed.dot(features).tolist()))
        moved = np.abs(features.dot(move))
        longest = moved.item(moved.argmax())
        if longest > LONGEST_STEP:
            move *= LONGEST_STEP / longest
        self._weights += move
        self._weights[1] = max(self._weights[1], 0.0)  # more confidence is never less chance
        self._depths *= kept
        self._depths += np.add.reduce(features[:, 2]) / DEPTH_SCALE, len(missed)

    def _feature(self, confidences: Floats) -> Floats:
        match self._confidence:
            case Confidence.PROBABILITY:
                inside = np.minimum(np.maximum(confidences, EDGE), 1 - EDGE)
                return np.asarray(np.log(inside / (1 - inside)))
            case Confidence.MATCH_LENGTH:
                return np.asarray(np.log(np.maximum(confidences, 1.0)))
            case Confidence.MARGIN:
                return np.asarray(np.minimum(np.maximum(confidences, -LARGEST_MARGIN), LARGEST_MARGIN))


def _solved(matrix: list[list[float]], right: list[float]) -> tuple[float, float, float]:
    """x of matrix @ x = right, where matrix is 3 by 3, symmetric and positive definite; by its Cholesky factors.

    In Python floats: a call of the library takes several times longer than these few sums.
    """
    (a, b, c), (_, d, e), (_, _, f) = matrix
    lower_b, lower_c = b / a, c / a
    pivot = d - lower_b * b
    rest = e - lower_b * c
    lower_e = rest / pivot
    last = f - lower_c * c - lower_e * rest
    second = right[1] - lower_b * right[0]
    z = (right[2] - lower_c * right[0] - lower_e * second) / last
    y = second / pivot - lower_e * z
    return right[0] / a - lower_b * y - lower_c * z, y, z


def sigmoid(logits: Floats) -> Floats:
    """In place."""
    np.negative(logits, out=logits)
    np.exp(logits, out=logits)
    logits += _ONE
    return np.reciprocal(logits, out=logits)
