"""What a head is expected to bring. Oracle: the same sums with the prices written out.

Planted bugs seen to be caught: the first token of a draft counted twice, passes that cost nothing.
"""

import pytest

from faser.distill.acceptance import Expected, expected_speedup, speedup_in_words
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.timing.cost_model import CostModel

ACCEPTED = (0.7, 0.4, 0.2)


def costs(pass_s: float) -> CostModel:
    return CostModel(StepTimes.proportional(step_s=1.0, row_s=0.05, pass_s=pass_s, pass_row_s=0.01))


def by_hand(requests: int, length: int, pass_s: float) -> float:
    brought = sum(ACCEPTED[:length])
    step_s = 1.0 + 0.05 * requests * (1 + length)
    passes_s = length * (pass_s + 0.01 * requests) + 0.01 * round(brought * requests)
    return (1 + brought) * (1.0 + 0.05 * requests) / (step_s + passes_s)


@pytest.mark.parametrize("requests", [1, 4, 32])
@pytest.mark.parametrize("pass_s", [0.02, 0.3])
def test_the_best_length_is_chosen_and_priced(requests: int, pass_s: float) -> None:
    found = expected_speedup(costs(pass_s), ACCEPTED, requests)
    speedups = {length: by_hand(requests, length, pass_s) for length in (1, 2, 3)} | {0: 1.0}
    assert found.speedup == pytest.approx(max(speedups.values()), rel=1e-6)
    assert speedups[found.draft_tokens] == max(speedups.values())


def test_drafts_that_cost_more_than_they_bring_are_not_made() -> None:
    found = expected_speedup(costs(2.0), ACCEPTED, 4)
    assert found == Expected(requests=4, draft_tokens=0, speedup=1.0)
    assert speedup_in_words([found]).startswith("not worth using")


def test_the_sentence_names_the_largest_load_at_which_drafts_pay() -> None:
    found = [
        Expected(requests=requests, draft_tokens=2, speedup=speedup)
        for requests, speedup in ((1, 1.5), (4, 1.1), (16, 1.01))
    ]
    assert speedup_in_words(found) == (
        "worth using at up to 4 requests at once: answers at temperature 0 are expected up to 1.50 times as fast"
    )
    assert "at one request at a time" in speedup_in_words(found[:1])
