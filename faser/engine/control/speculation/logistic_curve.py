"""LogisticCurve: the chance that a draft token is accepted, given its confidence and its depth."""

import math
from typing import NamedTuple

import numpy as np

from faser.config.speculation import DrafterInfo
from faser.types.arrays import Floats

# Reasoned, not fitted: how throughput changes with each halved or doubled is in results/control-constants.json.
CURVE_KEPT = 0.5 ** (1 / 400)  # of the curvature after one more decided token
_PRIOR_CURVATURE = (2.0, 4.0, 40.0)  # intercept, slope, depth: how firmly each is believed before any data
_LEAST_CURVATURE = 0.02  # of the intercept, beside that of the data's spread: the matrix stays regular
DEPTH_SCALE = 1 / 8  # of a token's depth: features of about one size learn alike
LONGEST_STEP = 1.0  # logits: one odd step must not move the curve further
LARGEST_MARGIN = 12.0  # nats: beyond it a token is as sure as one can be
EDGE = 0.01  # of a probability from 0 and 1, before its logarithm is taken
_SHAPES = ((3,), (3, 3), (3, 3), (2,))


class CurveMemory(NamedTuple):
    """Memory of a curve: [3], [3, 3], [3, 3]; depths: [2] sum and count of those it has seen. Written in place."""

    weights: Floats
    curvature: Floats
    prior_curvature: Floats
    depths: Floats


class LogisticCurve:
    """The curve of one drafter, as native/acceptance.cpp computes and learns it.

    logit of acceptance = w · (1, feature of the confidence, depth / 8). Online logistic regression learns w: every
    step makes one Newton step on the log likelihood of its tokens, against the decayed curvature of all earlier
    tokens: an extended Kalman filter without process noise but with forgetting.

    drafter: its kind of confidence chooses the feature: a margin in nats as it is, the logit of a probability, the
    logarithm of a match's length. Its priors hold before any data. memory: None makes its own.
    """

    def __init__(self, drafter: DrafterInfo, memory: CurveMemory | None = None) -> None:
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

    def line(self) -> tuple[float, float]:
        """(intercept, slope) over the confidence itself, at the mean depth. For margins only."""
        intercept, slope, fall = self._weights.tolist()
        depth_sum, depth_count = self._depths.tolist()
        return intercept + fall * DEPTH_SCALE * depth_sum / depth_count, slope
