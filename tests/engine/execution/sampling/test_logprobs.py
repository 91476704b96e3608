"""Reported log probabilities. Oracle: double precision, one row at a time."""

import math

import pytest
import torch

from faser.engine.execution.sampling.logprobs import position_logprobs
from tests.engine.execution.sampling.test_distribution import ordered_ids, tied_values


@pytest.mark.parametrize("tied", [False, True])
def test_reports_equal_a_plain_computation(tied: bool) -> None:
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(1)) * 4
    logits = logits.round() if tied else logits
    token_ids, num_top = [0, 499, 17, 3, 250, 8], [0, 1, 5, 20, 2, 7]

    reports = position_logprobs(logits, token_ids, num_top)

    for row, report in enumerate(reports):
        values: list[float] = logits[row].tolist()
        total = math.log(sum(math.exp(value) for value in values))
        best = [i for _, i in sorted((-value, i) for i, value in enumerate(values))][: num_top[row]]
        chosen = values[token_ids[row]]
        assert report.token_id == token_ids[row]
        assert report.logprob == pytest.approx(chosen - total, abs=1e-5)
        assert report.rank == 1 + sum(value > chosen for value in values)
        assert [token_id for token_id, _ in report.top] == best
        assert [value for _, value in report.top] == pytest.approx([values[i] - total for i in best], abs=1e-5)


@pytest.mark.parametrize("num_levels", [1, 3, 30, 100_000])
@pytest.mark.parametrize("width", [0, 1, 20, 63, 299, 300, 400])
def test_alternatives_are_the_first_of_the_order_whatever_the_ties(width: int, num_levels: int) -> None:
    logits = tied_values(10, 300, num_levels)
    reports = position_logprobs(logits, [7] * 10, [width] * 10)
    found = [[token_id for token_id, _ in report.top] for report in reports]
    assert found == [ordered_ids(row)[:width] for row in logits]


def test_no_more_alternatives_are_reported_than_the_vocabulary_has() -> None:
    (report,) = position_logprobs(torch.zeros(1, 3), [2], [20])

    assert [token_id for token_id, _ in report.top] == [0, 1, 2]
    assert report.rank == 1


def test_logits_are_left_as_they_are() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    before = logits.clone()

    position_logprobs(logits, [1, 2], [3, 3])

    assert torch.equal(logits, before)
