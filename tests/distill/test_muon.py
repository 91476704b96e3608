"""Muon. Oracles: torch.optim.Muon, which computes in bfloat16; the singular vectors of a step.

Planted bugs seen to be caught: momentum without a look ahead, wide matrices transposed, a step scaled by the rows.
"""

import pytest
import torch

from faser.distill.arithmetic import Muon, orthogonal


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_steps_are_those_of_torch(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    ours, theirs = (
        torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(2))) for _ in "ab"
    )
    one = Muon([{"params": [ours]}], lr=0.05, weight_decay=0.1, dtype=torch.bfloat16)
    other = torch.optim.Muon(
        [theirs], lr=0.05, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(6):
        gradient = torch.randn(shape)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        one.step()
        other.step()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_a_step_has_singular_values_near_1_in_the_directions_of_the_gradient(shape: tuple[int, int]) -> None:
    torch.manual_seed(3)
    matrix = torch.randn(shape)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found = u.mT @ orthogonal(matrix) @ v.mT
    assert found.diagonal().min() > 0.6
    assert found.diagonal().max() < 1.3
    assert (found - found.diagonal().diag()).abs().max() < 1e-4
