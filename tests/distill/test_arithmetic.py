"""Muon. Oracles: torch.optim.Muon, which computes in bfloat16; the singular vectors of a step.

Planted bugs seen to be caught: momentum without a look ahead, wide matrices transposed, a step scaled by the rows,
a Gram matrix that is multiplied from one side, a block that is left out.

Products and norms with gradients. Oracle: torch's own operations in float64.
"""

import pytest
import torch
from torch import Tensor

from faser.distill import arithmetic
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


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (24, 80), (80, 24)])
def test_a_step_has_singular_values_near_1_in_the_directions_of_the_gradient(shape: tuple[int, int]) -> None:
    torch.manual_seed(3)
    matrix = torch.randn(shape)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found = u.mT @ orthogonal(matrix) @ v.mT
    assert found.diagonal().min() > 0.6
    assert found.diagonal().max() < 1.3
    assert (found - found.diagonal().diag()).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96, 480), (480, 96), (96, 96)])
def test_steps_of_gradients_with_few_large_singular_values_stay_small(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Seen to catch: Gram matrices iterated in bfloat16, whose steps have singular values of hundreds."""
    left, right = (torch.linalg.qr(seeded(size, 96, seed=size))[0] for size in shape)
    gradient = left * torch.arange(1, 97).float() ** -2 @ right.mT
    found = orthogonal(gradient.to(dtype)).float()
    assert torch.linalg.svdvals(found).max() < 1.3
    assert (left.mT @ found @ right).diagonal()[:8].min() > 0.6


@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (25, 30)])
def test_iterating_over_gram_matrices_and_in_blocks_gives_the_same(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(4)
    matrix = torch.randn(shape)
    monkeypatch.setattr(arithmetic, "_LONG", 1e9)
    directly = orthogonal(matrix)
    short = 0 if shape[0] < shape[1] else 1
    blocks = torch.cat([orthogonal(block) for block in matrix.chunk(3, short)], short)
    monkeypatch.setattr(arithmetic, "_LONG", 1.0)
    torch.testing.assert_close(orthogonal(matrix), directly, rtol=0, atol=1e-4)
    monkeypatch.setattr(arithmetic, "_BLOCK", 9)
    torch.testing.assert_close(orthogonal(matrix), blocks, rtol=0, atol=1e-4)
    assert (blocks - directly).abs().max() > 1e-2, "blocks are not the whole"


def seeded(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_norm_and_its_gradients() -> None:
    x, weight, grad = seeded(7, 12, seed=1), seeded(12, seed=2), seeded(7, 12, seed=3)
    own = [each.clone().requires_grad_() for each in (x, weight)]
    arithmetic.rms_norm(own[0], own[1], 1e-5).backward(grad)  # type: ignore[no-untyped-call]
    oracle = [each.double().requires_grad_() for each in (x, weight)]
    expected = torch.nn.functional.rms_norm(oracle[0], (12,), oracle[1], 1e-5)
    expected.backward(grad.double())  # type: ignore[no-untyped-call]
    torch.testing.assert_close(
        arithmetic.rms_norm(x, weight, 1e-5).double(), expected.detach(), rtol=1e-5, atol=1e-5
    )
    for found, wanted in zip(own, oracle, strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        torch.testing.assert_close(found.grad.double(), wanted.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows, distance", [(3, 0.0), (1500, 0.0), (3, 0.9), (1500, 0.9)])
def test_the_loss_and_its_gradients(rows: int, distance: float) -> None:
    """Several chunks of logits, or a part of one. Distributions sum to less than 1, as cut ones do."""
    hidden, head = seeded(rows, 8, seed=1), seeded(20, 8, seed=2)
    generator = torch.Generator().manual_seed(4)
    ids = torch.stack([torch.randperm(20, generator=generator)[:5] for _ in range(rows)])
    probs = torch.rand((rows, 5), generator=generator) / 5
    weights = torch.rand(rows, generator=generator)
    own = [each.clone().requires_grad_() for each in (hidden, head)]
    loss, best, overlap = arithmetic.linear_loss(own[0], own[1], ids, probs, weights, distance)
    loss.backward()  # type: ignore[no-untyped-call]
    oracle = [each.double().requires_grad_() for each in (hidden, head)]
    logits = oracle[0] @ oracle[1].T
    said = logits.log_softmax(-1).gather(-1, ids)
    shared = torch.minimum(said.exp(), probs.double()).sum(-1)
    each = -(1 - distance) * (probs.double() * said).sum(-1) + distance * (2 - 2 * shared)
    expected = (weights.double() * each).sum()
    expected.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(best, logits.argmax(-1))
    torch.testing.assert_close(overlap.double(), shared.detach(), rtol=1e-5, atol=1e-5)
    for found, wanted in zip(own, oracle, strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        torch.testing.assert_close(found.grad.double(), wanted.grad, rtol=1e-4, atol=1e-4)


def test_rotation_turns_pairs_by_their_angles() -> None:
    x, turns = seeded(3, 2, 6, seed=1), seeded(3, 3, seed=2)
    angles = torch.cat((turns.cos(), turns.sin()), -1)
    pairs = torch.complex(x[..., :3], x[..., 3:]) * torch.polar(torch.ones_like(turns), turns)[:, None]
    torch.testing.assert_close(arithmetic.rotate(x, angles), torch.cat((pairs.real, pairs.imag), -1))
