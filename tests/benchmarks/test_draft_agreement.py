"""Agreement of two models is what their distributions say. Oracle: numbers worked out by hand."""

import pytest
import torch

from benchmarks.draft_agreement import agreement


def test_acceptance_follows_from_both_distributions() -> None:
    target = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.4, 0.0]]).log()
    drafter = torch.tensor([[0.2, 0.7, 0.1], [0.9, 0.1, 0.0]]).log()
    found = agreement(target, drafter, 1.0)
    assert found.positions == 2
    assert found.greedy == pytest.approx(0.5)
    assert found.accepted_greedy_draft == pytest.approx((0.3 + 0.6) / 2)
    assert found.accepted_sampled_draft == pytest.approx((0.6 + 0.7) / 2)
    # Where the tokens' intervals overlap: [0, .2), [.5, .8), [.9, 1) and [0, .6), [.9, 1).
    assert found.accepted_coupled_draft["0.0"] == pytest.approx((0.6 + 0.7) / 2, abs=1 / 40)


def test_a_temperature_sharpens_what_is_compared() -> None:
    target, drafter = torch.tensor([[2.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    found = agreement(target, drafter, 0.5)
    assert found.accepted_greedy_draft == pytest.approx(float(torch.sigmoid(torch.tensor(2.0))))
    assert found.accepted_sampled_draft == pytest.approx(1.0)
