"""Whether a trained head is better than the one that is served, on the same held-out answers.

Each answer has its own mean of accepted tokens a draft, over its drafts; answers differ far more from each other
than heads do. So the difference is taken within each answer, and its standard error is that of a ratio estimator
over answers:

    D = Σ n_i d_i / Σ n_i        SE² = k / (k - 1) · Σ n_i² (d_i - D)² / (Σ n_i)²        n_i drafts, k answers
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_ANSWERS = 8
_ERRORS = 2.0  # standard errors by which it must be better; one in 40 heads that are no better passes
_LEAST_GAIN = 0.01  # and by this share: less is not worth a swap


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLength:
    """One answer. drafts: that were tried on it. length: accepted tokens expected of each."""

    drafts: int
    length: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """before, after: accepted tokens a draft of both heads. noise: what their difference must exceed."""

    before: float
    after: float
    noise: float
    answers: int

    @property
    def is_better(self) -> bool:
        return self.answers >= LEAST_ANSWERS and self.after - self.before > self.noise


def compare(before: Sequence[AnswerLength], after: Sequence[AnswerLength]) -> Comparison:
    """Of the same answers, in the same order."""
    drafts = np.array([each.drafts for each in before], dtype=np.float64)
    assert [each.drafts for each in after] == drafts.tolist(), "both heads are tried on the same drafts"
    answers = int((drafts > 0).sum())
    if answers < 2:
        return Comparison(before=0.0, after=0.0, noise=math.inf, answers=answers)
    lengths = [np.array([each.length for each in head]) for head in (before, after)]
    total = float(drafts.sum())
    means = [float((drafts * each).sum() / total) for each in lengths]
    deviations = lengths[1] - lengths[0] - (means[1] - means[0])
    error = math.sqrt(answers / (answers - 1) * float((drafts**2 * deviations**2).sum())) / total
    noise = max(_ERRORS * error, _LEAST_GAIN * means[0])
    return Comparison(before=means[0], after=means[1], noise=noise, answers=answers)
