"""When a head counts as better. Oracle: how often luck alone passes, over seeded draws.

Planted bugs that these tests have caught: the noise of each head by itself instead of that of the difference;
answers that count alike, whatever their length.
"""

import numpy as np
import pytest

from faser.distill.online_learner import LEAST_ANSWERS, AnswerLength, compare


def lengths(values: list[float], drafts: list[int] | None = None) -> list[AnswerLength]:
    counts = drafts or [10] * len(values)
    return [AnswerLength(drafts=count, length=value) for count, value in zip(counts, values, strict=True)]


def luck(rng: np.random.Generator, gain: float) -> bool:
    """Answers differ by 1 from each other, heads by .1 on each answer, and by the gain on all."""
    base = rng.normal(2.0, 1.0, 30)
    drafts = rng.integers(1, 60, 30).tolist()
    before, after = (base + shift + rng.normal(0.0, 0.1, 30) for shift in (0.0, gain))
    return compare(lengths(before.tolist(), drafts), lengths(after.tolist(), drafts)).is_better


def test_luck_rarely_passes_and_a_gain_that_is_far_below_the_answers_spread_does() -> None:
    rng = np.random.default_rng(1)
    assert sum(luck(rng, 0.0) for _ in range(500)) < 25
    assert sum(luck(rng, 0.15) for _ in range(500)) > 450


def test_an_answer_counts_by_its_drafts() -> None:
    found = compare(lengths([1.0, 2.0], [30, 10]), lengths([1.5, 2.0], [30, 10]))
    assert (found.before, found.after) == (1.25, 1.625)


def test_few_answers_prove_nothing() -> None:
    few, enough = [1.0] * (LEAST_ANSWERS - 1), [1.0] * LEAST_ANSWERS
    assert not compare(lengths(few), lengths([2.0] * len(few))).is_better
    assert compare(lengths(enough), lengths([2.0] * len(enough))).is_better
    nothing = compare([], [])
    assert (nothing.is_better, nothing.answers) == (False, 0)


def test_answers_too_short_for_a_draft_do_not_count() -> None:
    one = lengths([1.0] * LEAST_ANSWERS, [5] * (LEAST_ANSWERS - 1) + [0])
    assert compare(one, one).answers == LEAST_ANSWERS - 1


@pytest.mark.parametrize("gain, better", [(0.005, False), (0.02, True)])
def test_a_gain_of_less_than_a_hundredth_is_not_worth_a_swap(gain: float, better: bool) -> None:
    before, after = [1.0] * 20, [1.0 + gain] * 20
    assert compare(lengths(before), lengths(after)).is_better is better
