"""Mixtures of few rows in three launches against a brute force in float32, row after row and expert after expert.

Bugs these tests have been seen to catch: an inverted mask, one of the row before; the weight of an expert counted
twice, the bias of the next expert, no shared expert, another row's logit for it; experts that see what the router
sees; pairs of an expert in another order; a counter that is not left at 0.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from faser.errors import EngineError
from faser.kernels.cuda.triton.expert_weights import ExpertWeights
from faser.kernels.cuda.triton.experts import FEW_ROWS
from faser.kernels.cuda.triton.few_row_experts import FEW_ROW_TILES, FewRowExperts
from tests.kernels.cuda.triton.rows import DEVICE

COUNT, TOP, HIDDEN, INNER, EPS = 7, 3, 136, 72, 1e-5  # no multiples of a program's outputs, nor of its depth
NEAR = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
PADDED = torch.tensor([9, 0, -1, 7, -1, 3, -1, -1])


@dataclass
class Mixture:
    """Seeded weights. shares: the last expert is the one that every row passes."""

    dtype: torch.dtype = torch.bfloat16
    activation: str = "silu"
    renormalise: bool = True
    biased: bool = False
    scaled: bool = False
    shares: bool = False
    other_norm: bool = False
    tiles: str = next(iter(FEW_ROW_TILES))
    read: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64, device=DEVICE))

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(0)
        count = COUNT + self.shares
        self.router = 2 * self.random(count, HIDDEN)
        self.gate_up = [self.random(2 * INNER, HIDDEN) for _ in range(count)]
        self.down = [self.random(HIDDEN, INNER) for _ in range(count)]
        self.router_bias = self.random(1, count)[0]
        self.gate_up_biases = [8 * self.random(1, 2 * INNER)[0] * math.sqrt(2 * INNER) for _ in range(count)]
        self.down_biases = [4 * self.random(1, HIDDEN)[0] * math.sqrt(HIDDEN) for _ in range(count)]
        self.scales = 0.2 + 0.4 * torch.arange(COUNT)
        self.norm, self.router_norm = (1 + self.random(1, HIDDEN).float()[0] for _ in range(2))
        if not self.other_norm:
            self.router_norm = self.norm
        weights = ExpertWeights.of(
            _there(self.gate_up),
            _there(self.down),
            _there(self.gate_up_biases) if self.biased else None,
            _there(self.down_biases) if self.biased else None,
        )
        self.kernels = FewRowExperts(
            networks=weights,
            router=self.router.to(DEVICE),
            router_bias=self.router_bias.to(DEVICE) if self.biased else None,
            top_k=TOP,
            renormalise=self.renormalise,
            activation=self.activation,
            scales=self.scales.to(DEVICE) if self.scaled else None,
            shares=self.shares,
        )

    def random(self, rows: int, width: int) -> Tensor:
        drawn = torch.randn(rows, width, generator=self._random) / math.sqrt(width)
        return drawn.to(self.dtype)

    def rows(self, count: int) -> Tensor:
        return (30 * self.random(count, HIDDEN)).to(self.dtype)

    def added(self, x: Tensor, slots: Tensor | None = None) -> Tensor:
        hidden = torch.ones_like(x).to(DEVICE)
        marks = None if slots is None else slots.to(DEVICE)
        self.kernels(
            x.to(DEVICE), self.norm.to(DEVICE), EPS, hidden, self.read, marks,
            self.router_norm.to(DEVICE) if self.other_norm else None, tiles=FEW_ROW_TILES[self.tiles],
        )  # fmt: skip
        assert not self.kernels.arrived.any()
        return hidden.cpu()

    def wanted(self, x: Tensor) -> tuple[Tensor, int]:
        """The results, and how many experts were chosen."""
        found, chosen = torch.ones(x.shape), set()
        for row, value in enumerate(x):
            scaled = (value.float() / (value.float().square().mean() + EPS).sqrt()).to(self.dtype).float()
            normed, by_router = ((scaled * each).to(self.dtype).float() for each in (self.norm, self.router_norm))
            logits = self.router.float() @ by_router + (self.router_bias.float() if self.biased else 0.0)
            probs = logits[:COUNT].softmax(0)
            experts = probs.argsort(descending=True, stable=True)[:TOP].tolist()
            chosen |= set(experts)
            total = float(probs[experts].sum()) if self.renormalise else 1.0
            weights = {each: float(probs[each]) / total for each in experts}
            if self.scaled:
                weights = {each: weight * float(self.scales[each]) for each, weight in weights.items()}
            if self.shares:
                weights[COUNT] = float(logits[COUNT].sigmoid())
            for expert, weight in weights.items():
                found[row] += weight * self._network(normed, expert)
        return found.to(self.dtype), len(chosen)

    def _network(self, x: Tensor, expert: int) -> Tensor:
        both = self.gate_up[expert].float() @ x + (self.gate_up_biases[expert].float() if self.biased else 0.0)
        gate, up = both.to(self.dtype).float().chunk(2)
        if self.activation == "swigluoai":
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        else:
            inner = (
                functional.silu(gate) if self.activation == "silu" else functional.gelu(gate, approximate="tanh")
            )
            inner = inner * up
        down = self.down[expert].float() @ inner.to(self.dtype).float()
        return down + (self.down_biases[expert].float() if self.biased else 0.0)


def _there(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    return tuple(each.to(DEVICE) for each in tensors)


KINDS: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "OLMoE": {"renormalise": False},
    "gpt-oss": {"activation": "swigluoai", "biased": True},
    "Gemma 4": {"activation": "gelu_tanh", "scaled": True, "other_norm": True},
    "Qwen3.5": {"shares": True},
}


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.full(but=("Qwen3.5-dtype0", "OLMoE-dtype1", "gpt-oss-dtype0", "Gemma 4-dtype1", "Qwen3-dtype1"))
def test_three_launches_compute_what_one_expert_after_the_other_computes(kind: str, dtype: torch.dtype) -> None:
    for tiles, count in zip(FEW_ROW_TILES, (3, FEW_ROWS), strict=True):
        mixture = Mixture(dtype, tiles=tiles, **KINDS[kind])
        x = mixture.rows(count)
        wanted, read = mixture.wanted(x)
        near = NEAR[dtype] * max(1.0, float(wanted.std()))
        assert_close(mixture.added(x), wanted, rtol=2 * NEAR[dtype], atol=4 * near)
        assert float(wanted.std()) > 0.2
        assert mixture.read.item() == read


@pytest.mark.parametrize(("kind", "tiles"), [*zip(KINDS, 3 * [*FEW_ROW_TILES], strict=False)])
@pytest.mark.full(but=("Gemma 4-3 launches of 32 outputs", "Qwen3.5-3 launches of 64 outputs"))
def test_a_row_has_the_same_bits_alone_and_among_others(kind: str, tiles: str) -> None:
    """Oracle: the row by itself. Planted: a row's sums in the order in which the experts' programs end."""
    mixture = Mixture(tiles=tiles, **KINDS[kind])
    x = mixture.rows(FEW_ROWS)
    found = mixture.added(x)
    for row in (0, 6):
        assert torch.equal(mixture.added(x[row : row + 1])[0], found[row])
    assert torch.equal(mixture.added(x[[5, 2, 7]]), found[[5, 2, 7]])


@pytest.mark.parametrize("kind", ["Gemma 4", "Qwen3.5"])
def test_rows_of_padding_choose_no_experts_and_stay_as_they_are(kind: str) -> None:
    mixture = Mixture(**KINDS[kind])
    x = mixture.rows(FEW_ROWS)
    valid = PADDED >= 0
    alone = mixture.added(x[valid])
    read = mixture.read.item()
    x[~valid] = torch.nan
    found = mixture.added(x, PADDED)
    assert torch.equal(found[valid], alone)
    assert torch.equal(found[~valid], torch.ones_like(found[~valid]))
    assert mixture.read.item() == 2 * read
    assert torch.equal(mixture.added(x, torch.full_like(PADDED, -1)), torch.ones_like(x))
    assert mixture.read.item() == 2 * read


def test_of_equal_experts_the_lower_ones_are_chosen() -> None:
    mixture = Mixture()
    mixture.kernels.router.zero_()
    mixture.router.zero_()
    x = mixture.rows(2)
    assert_close(mixture.added(x), mixture.wanted(x)[0], rtol=2.0**-6, atol=2.0**-4)
    assert mixture.read.item() == TOP


def test_rows_that_are_no_numbers_harm_no_others_and_choose_every_expert_once() -> None:
    mixture = Mixture(shares=True)
    x = mixture.rows(3)
    wanted = mixture.added(x)
    x[1] = torch.nan
    found = mixture.added(x)
    assert torch.equal(found[::2], wanted[::2])
    assert found[1].isnan().all()


def test_what_does_not_fit_is_refused_by_name() -> None:
    mixture = Mixture()
    x = mixture.rows(2).to(DEVICE)
    norm = mixture.norm.to(DEVICE)
    tiles = FEW_ROW_TILES[mixture.tiles]
    with pytest.raises(EngineError, match=r"norm has shape \(135,\); the kernel needs \(136,\)"):
        mixture.kernels(x, norm[:135], EPS, x, mixture.read, tiles=tiles)
    with pytest.raises(EngineError, match=r"hidden is torch\.float32"):
        mixture.kernels(x, norm, EPS, x.float(), mixture.read, tiles=tiles)
