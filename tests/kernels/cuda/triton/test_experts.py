"""Triton's mixtures of experts against the torch backend's, expert by expert.

Bugs these tests have been seen to catch: weights never renormalised, gate and up swapped, a pair's result put in
the place of the next pair, the last pairs of an expert left out, its first ones computed twice instead, of equal
experts the higher one; the biases of the next expert, those of gate and up swapped, none, a product rounded before
its bias is added; up or gate not clamped, a gate clamped from below too.
"""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from faser.errors import EngineError
from faser.kernels.cuda.flashinfer.device_kernels import ExpertMatrices, experts_kernels
from faser.kernels.cuda.triton.expert_weights import ExpertWeights
from faser.kernels.cuda.triton.experts import (
    Tiles,
    down,
    experts,
    gate_up,
    most_blocks,
    route,
)
from faser.kernels.interface.blocks import Experts
from faser.kernels.interface.shapes import PackedLinear
from faser.kernels.torch_backend import TorchBackend
from faser.types.activation import Activation
from tests.kernels.cuda.triton.rows import DEVICE

COUNT, TOP, HIDDEN, INNER = 7, 3, 136, 72  # no multiples of a program's outputs, nor of its depth
NEAR = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


class Mixture:
    """Seeded weights, and what both kernels make of them."""

    def __init__(self, dtype: torch.dtype, *, biased: bool = False) -> None:
        self._random = torch.Generator().manual_seed(0)
        self.dtype = dtype
        self.router = self.random(COUNT, HIDDEN)
        self.gate_up = tuple(self.random(2 * INNER, HIDDEN) for _ in range(COUNT))
        self.down = tuple(self.random(HIDDEN, INNER) for _ in range(COUNT))
        # Gates far beyond where they are clamped, on both sides.
        self.gate_up_biases = tuple(8 * self.random(1, 2 * INNER)[0] * math.sqrt(2 * INNER) for _ in range(COUNT))
        self.down_biases = tuple(4 * self.random(1, HIDDEN)[0] * math.sqrt(HIDDEN) for _ in range(COUNT))
        self.biased = biased
        self.weights = ExpertWeights.of(
            _there(self.gate_up),
            _there(self.down),
            _there(self.gate_up_biases) if biased else None,
            _there(self.down_biases) if biased else None,
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

    def added(
        self,
        x: Tensor,
        *,
        renormalise: bool = True,
        activation: Activation = Activation.SILU,
        scales: Tensor | None = None,
        shared: tuple[Tensor, Tensor] | None = None,
        slots: Tensor | None = None,
    ) -> Tensor:
        """As the backend calls the kernels. shared: what a shared expert gives, and its logits."""
        block = Experts(
            router=None,
            gate_up=self.gate_up,
            down=self.down,
            top_k=TOP,
            renormalise=renormalise,
            activation=activation,
            scales=None if scales is None else scales.to(DEVICE),
        )
        gate_up = self._matrices(self.gate_up, self.gate_up_biases)
        run = experts_kernels(block, gate_up, self._matrices(self.down, self.down_biases))
        hidden = torch.ones_like(x).to(DEVICE)
        beside = None if shared is None else (shared[0].to(DEVICE), shared[1].to(DEVICE))
        marks = None if slots is None else slots.to(DEVICE)
        run(x.to(DEVICE), self.logits(x).to(DEVICE), hidden, self.read, beside, marks)
        return hidden.cpu()

    def _matrices(self, weights: tuple[Tensor, ...], biases: tuple[Tensor, ...]) -> ExpertMatrices:
        return ExpertMatrices(weights=_there(weights), biases=_there(biases) if self.biased else None)

    def wanted(
        self,
        x: Tensor,
        *,
        renormalise: bool = True,
        activation: Activation = Activation.SILU,
        scales: Tensor | None = None,
    ) -> tuple[Tensor, int]:
        backend, hidden = TorchBackend(), torch.ones_like(x)
        block = Experts(
            router=backend.pack(self.router),
            gate_up=self._packed(backend, self.gate_up, self.gate_up_biases),
            down=self._packed(backend, self.down, self.down_biases),
            top_k=TOP,
            renormalise=renormalise,
            activation=activation,
            scales=scales,
        )
        backend.experts(x, block, hidden)
        return hidden, backend.experts_read

    def _packed(
        self, backend: TorchBackend, weights: tuple[Tensor, ...], biases: tuple[Tensor, ...]
    ) -> tuple[PackedLinear, ...]:
        pairs = zip(weights, biases, strict=True)
        return tuple(backend.pack(weight, bias if self.biased else None) for weight, bias in pairs)


def _there(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(each.to(DEVICE) for each in tensors)


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize(
    "rows, renormalise, activation", [(1, True, Activation.SILU), (5, False, Activation.GELU_TANH)]
)
def test_a_mixture_is_that_of_one_expert_after_the_other(
    rows: int, renormalise: bool, activation: Activation, dtype: torch.dtype
) -> None:
    mixture = Mixture(dtype)
    x = mixture.rows(rows)
    wanted, read = mixture.wanted(x, renormalise=renormalise, activation=activation)
    found = mixture.added(x, renormalise=renormalise, activation=activation)
    assert_close(found, wanted, rtol=NEAR[dtype], atol=4 * NEAR[dtype])
    assert not torch.equal(wanted, torch.ones_like(wanted))
    assert mixture.read.tolist() == [read]


def test_rows_of_padding_choose_no_experts_and_stay_as_they_are() -> None:
    """And harm no other row. Planted: an inverted mask, one of the row before, no mask where results are added."""
    mixture = Mixture(torch.bfloat16)
    x = mixture.rows(8)
    alone = mixture.added(x[[0, 1, 3, 5]])
    read = mixture.read.item()
    slots = torch.tensor([9, 0, -1, 7, -1, 3, -1, -1])
    x[~(slots >= 0)] = torch.nan
    found = mixture.added(x, slots=slots, shared=(torch.zeros(8, HIDDEN), torch.zeros(8)))
    assert torch.equal(found[slots >= 0], alone)
    assert torch.equal(found[slots < 0], torch.ones(4, HIDDEN, dtype=x.dtype))
    assert mixture.read.item() - read == read < COUNT
    mixture.added(x, slots=torch.full_like(slots, -1))
    assert mixture.read.item() == 2 * read


def test_what_a_shared_expert_gives_is_weighed_by_its_own_logit() -> None:
    """In float32, with the others: the sum is rounded once."""
    mixture, random = Mixture(torch.bfloat16), torch.Generator().manual_seed(1)
    x = mixture.rows(5)
    given, logits = torch.randn(5, HIDDEN, generator=random), torch.randn(5, generator=random)
    alone = mixture.added(x).float()
    found = mixture.added(x, shared=(given, logits)).float()
    assert_close(found, alone + logits.sigmoid()[:, None] * given, rtol=2**-6, atol=2**-6)


def test_weights_are_scaled_after_they_are_renormalised() -> None:
    """Planted: scaled before, by the next expert's scale, not at all."""
    mixture, scales = Mixture(torch.bfloat16), 0.2 + 0.4 * torch.arange(COUNT)
    x = mixture.rows(5)
    for renormalise in (True, False):
        found = mixture.added(x, renormalise=renormalise, scales=scales)
        wanted, _ = mixture.wanted(x, renormalise=renormalise, scales=scales)
        assert_close(found, wanted, rtol=NEAR[torch.bfloat16], atol=4 * NEAR[torch.bfloat16])
        assert not torch.allclose(found, mixture.added(x, renormalise=renormalise), atol=0.1)


@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("activation", [Activation.SILU, Activation.SWIGLU_OAI])
def test_biases_are_those_of_the_expert_and_gates_are_clamped(activation: Activation, dtype: torch.dtype) -> None:
    """The reference rounds gates more often: a few units in the last place of sums of large numbers."""
    mixture = Mixture(dtype, biased=True)
    x = mixture.rows(6)
    wanted, read = mixture.wanted(x, activation=activation)
    found = mixture.added(x, activation=activation)
    assert_close(found, wanted, rtol=2 * NEAR[dtype], atol=2 * NEAR[dtype] * float(wanted.std()))
    assert mixture.read.tolist() == [read]
    gates = torch.cat(
        [x @ each.T + bias for each, bias in zip(mixture.gate_up, mixture.gate_up_biases, strict=True)]
    )
    assert gates.max() > 14.0
    assert gates.min() < -14.0


def test_more_rows_than_a_program_has_are_all_computed() -> None:
    """All rows choose the same experts. A row has the same bits alone."""
    mixture = Mixture(torch.bfloat16)
    mixture.router = torch.zeros_like(mixture.router)
    x = mixture.rows(20)
    found, (wanted, _) = mixture.added(x), mixture.wanted(x)
    assert_close(found, wanted, rtol=NEAR[torch.bfloat16], atol=4 * NEAR[torch.bfloat16])
    for row in (0, 19):
        assert torch.equal(mixture.added(x[row : row + 1])[0], found[row])


@pytest.mark.parametrize("weights_first", [False, True])
def test_a_product_has_the_same_result_however_it_is_divided(weights_first: bool) -> None:
    """Experts of no pairs, of fewer than a block and of several blocks, the last of which is not full.

    Oracle: the product of each pair by itself. Planted: the pieces of an expert in the order of its blocks; full
    blocks alone; up left as it is where weights come first.
    """
    mixture = Mixture(torch.bfloat16, biased=True)
    x, logits = mixture.rows(40), torch.full((40, COUNT), -9.0)
    logits[:, 5], logits[:35, 1], logits[35:, 6], logits[:17, 3], logits[17:, 0] = 3.0, 2.0, 2.0, 1.0, 1.0
    routes = route(logits.to(DEVICE), mixture.read, top_k=TOP, renormalise=True)
    assert routes.counts.tolist() == [23, 35, 0, 17, 0, 40, 5]
    tiles = Tiles(rows=16, outputs=64, depth=64, weights_first=weights_first)
    on_device = gate_up(mixture.weights, x.to(DEVICE), routes, "silu", tiles)
    inner, given = on_device.cpu(), down(mixture.weights, on_device, routes, tiles).cpu()
    for expert, count in enumerate(routes.counts.tolist()):
        pairs = routes.pairs[expert, :count].long().cpu()
        gates = (
            x[pairs // TOP].float() @ mixture.gate_up[expert].float().T + mixture.gate_up_biases[expert].float()
        )
        gate, up = gates.bfloat16().float().chunk(2, -1)
        wanted = torch.nn.functional.silu(gate) * up
        # Both are products of gates that were rounded, of which a few are rounded the other way.
        assert_close(inner[pairs].float(), wanted, rtol=2.0**-5, atol=2.0**-6 * float(inner.float().std()))
        result = inner[pairs].float() @ mixture.down[expert].float().T + mixture.down_biases[expert].float()
        assert_close(given[pairs], result, rtol=2.0**-6, atol=2.0**-6 * float(given.std()))


def test_there_are_as_many_programs_as_pairs_could_need_and_no_more() -> None:
    """Oracle: every way to spread pairs over experts. Planted: full blocks alone; one more for each expert."""
    for count, pairs, rows in product((1, 2, 3), range(1, 10), (1, 2, 4)):
        spread = (each for each in product(range(pairs + 1), repeat=count) if sum(each) == pairs)
        assert most_blocks(pairs, count, rows) == max(sum(-(-n // rows) for n in each) for each in spread)


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


def test_a_row_of_no_numbers_chooses_every_expert_once() -> None:
    """Planted: the last expert again and again, whose list of pairs then runs over its end."""
    mixture = Mixture(torch.bfloat16)
    mixture.added(torch.full((5, HIDDEN), torch.nan, dtype=torch.bfloat16))
    assert mixture.read.tolist() == [TOP]


def test_what_does_not_fit_is_refused_by_name() -> None:
    mixture = Mixture(torch.bfloat16)
    x = mixture.rows(2)
    with pytest.raises(EngineError, match="down of expert 3 has shape"):
        ExpertWeights.of(mixture.gate_up, (*mixture.down[:3], mixture.down[3].T.contiguous(), *mixture.down[4:]))
    with pytest.raises(EngineError, match=r"gate_up of expert 6 is torch\.float32"):
        ExpertWeights.of((*mixture.gate_up[:6], mixture.gate_up[6].float()), mixture.down)
    with pytest.raises(EngineError, match=r"the biases of down has shape \(7, 2\)"):
        experts(
            _with_bias(mixture.weights, torch.zeros(COUNT, 2, dtype=x.dtype, device=DEVICE)), x.to(DEVICE),
            mixture.logits(x).to(DEVICE), torch.ones_like(x).to(DEVICE), mixture.read,
            top_k=3, renormalise=True, activation="silu",
        )  # fmt: skip
    with pytest.raises(EngineError, match=r"gate_up has shape \(144, 136\); the kernel needs \(144, 128\)"):
        experts(
            mixture.weights, x[:, :128].contiguous().to(DEVICE), mixture.logits(x).to(DEVICE),
            torch.ones(2, 128, dtype=x.dtype, device=DEVICE), mixture.read,
            top_k=3, renormalise=True, activation="silu",
        )  # fmt: skip


def _with_bias(weights: ExpertWeights, bias: Tensor) -> ExpertWeights:
    return replace(weights, down=replace(weights.down, bias=bias))
