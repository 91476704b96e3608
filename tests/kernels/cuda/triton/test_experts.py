"""Triton's mixtures of experts against the torch backend's, expert by expert.

Bugs these tests have been seen to catch: weights never renormalised, gate and up swapped, a pair's result put in
the place of the next pair, the last pairs of an expert left out, its first ones computed twice instead, of equal
experts the higher one.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from faser.errors import EngineError
from faser.kernels.cuda.triton.experts import ExpertWeights, experts
from faser.kernels.interface.blocks import Experts
from faser.kernels.torch_backend import TorchBackend
from tests.kernels.cuda.triton.rows import DEVICE

COUNT, TOP, HIDDEN, INNER = 7, 3, 136, 72  # no multiples of a program's outputs, nor of its depth
NEAR = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


class Mixture:
    """Seeded weights, and what both kernels make of them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._random = torch.Generator().manual_seed(0)
        self.dtype = dtype
        self.router = self.random(COUNT, HIDDEN)
        self.gate_up = tuple(self.random(2 * INNER, HIDDEN) for _ in range(COUNT))
        self.down = tuple(self.random(HIDDEN, INNER) for _ in range(COUNT))
        self.weights = ExpertWeights.of(
            tuple(each.to(DEVICE) for each in self.gate_up), tuple(each.to(DEVICE) for each in self.down)
        )
        self.read = torch.zeros(1, dtype=torch.int64, device=DEVICE)

    def random(self, rows: int, width: int) -> Tensor:
        drawn = torch.randn(rows, width, generator=self._random) / math.sqrt(width)
        return drawn.to(self.dtype)

    def rows(self, count: int) -> Tensor:
        return (2 * math.sqrt(HIDDEN) * self.random(count, HIDDEN)).to(self.dtype)

    def logits(self, x: Tensor) -> Tensor:
        backend = TorchBackend()
        found: Tensor = backend.linear(x, backend.pack(self.router), torch.empty(len(x), COUNT))
        return found

    def added(self, x: Tensor, *, renormalise: bool = True, activation: str = "silu") -> Tensor:
        hidden = torch.ones_like(x).to(DEVICE)
        experts(
            self.weights, x.to(DEVICE), self.logits(x).to(DEVICE), hidden, self.read,
            top_k=TOP, renormalise=renormalise, activation=activation,
        )  # fmt: skip
        return hidden.cpu()

    def wanted(self, x: Tensor, *, renormalise: bool = True, activation: str = "silu") -> tuple[Tensor, int]:
        backend, hidden = TorchBackend(), torch.ones_like(x)
        block = Experts(
            router=backend.pack(self.router),
            gate_up=tuple(backend.pack(each) for each in self.gate_up),
            down=tuple(backend.pack(each) for each in self.down),
            top_k=TOP,
            renormalise=renormalise,
            activation=activation,
        )
        backend.experts(x, block, hidden)
        return hidden, backend.experts_read


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("rows, renormalise, activation", [(1, True, "silu"), (5, False, "gelu_tanh")])
def test_a_mixture_is_that_of_one_expert_after_the_other(
    rows: int, renormalise: bool, activation: str, dtype: torch.dtype
) -> None:
    mixture = Mixture(dtype)
    x = mixture.rows(rows)
    wanted, read = mixture.wanted(x, renormalise=renormalise, activation=activation)
    found = mixture.added(x, renormalise=renormalise, activation=activation)
    assert_close(found, wanted, rtol=NEAR[dtype], atol=4 * NEAR[dtype])
    assert not torch.equal(wanted, torch.ones_like(wanted))
    assert mixture.read.tolist() == [read]


def test_more_rows_than_a_program_has_are_all_computed() -> None:
    """All rows choose the same experts. A row has the same bits alone."""
    mixture = Mixture(torch.bfloat16)
    mixture.router = torch.zeros_like(mixture.router)
    x = mixture.rows(20)
    found, (wanted, _) = mixture.added(x), mixture.wanted(x)
    assert_close(found, wanted, rtol=NEAR[torch.bfloat16], atol=4 * NEAR[torch.bfloat16])
    for row in (0, 19):
        assert torch.equal(mixture.added(x[row : row + 1])[0], found[row])


def test_of_equal_experts_the_lower_ones_are_chosen() -> None:
    mixture = Mixture(torch.bfloat16)
    mixture.router = torch.zeros_like(mixture.router)
    x = mixture.rows(2)
    assert_close(mixture.added(x), mixture.wanted(x)[0], rtol=2.0**-6, atol=2.0**-4)


def test_rows_that_are_no_numbers_harm_no_others() -> None:
    mixture = Mixture(torch.bfloat16)
    x = mixture.rows(3)
    wanted = mixture.added(x)
    x[1] = torch.nan
    found = mixture.added(x)
    assert torch.equal(found[::2], wanted[::2])
    assert found[1].isnan().all()


def test_what_does_not_fit_is_refused_by_name() -> None:
    mixture = Mixture(torch.bfloat16)
    x = mixture.rows(2)
    with pytest.raises(EngineError, match="down of expert 3 has shape"):
        ExpertWeights.of(mixture.gate_up, (*mixture.down[:3], mixture.down[3].T.contiguous(), *mixture.down[4:]))
    with pytest.raises(EngineError, match=r"gate_up of expert 6 is torch\.float32"):
        ExpertWeights.of((*mixture.gate_up[:6], mixture.gate_up[6].float()), mixture.down)
    with pytest.raises(EngineError, match=r"down has shape \(136, 72\); the kernel needs \(128, 72\)"):
        experts(
            mixture.weights, x[:, :128].contiguous().to(DEVICE), mixture.logits(x).to(DEVICE),
            torch.ones(2, 128, dtype=x.dtype, device=DEVICE), mixture.read,
            top_k=3, renormalise=True, activation="silu",
        )  # fmt: skip
