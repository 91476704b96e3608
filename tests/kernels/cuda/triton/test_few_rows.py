"""Products of few rows, with norm, gate or residual, are those of float64; a row's bits depend on that row alone.

Bugs these tests have been seen to catch: the norm left out, or over the wrong width; the residual added twice; a
row of the neighbour; the last step left out of a width that ends within it; gate and up exchanged; scales of the
neighbour, of the gate for up, and left out; the second half of what a lane reads exchanged with the first.
"""

import random as random_module
from functools import partial
from itertools import cycle

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from faser.errors import EngineError
from faser.kernels.cuda.triton.few_rows import MOST_ROWS, STAGES, few_rows
from faser.kernels.interface.fp8 import quantise_weight
from tests.kernels.cuda.triton.rows import DEVICE

EPS = 1e-5
NEAR = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def normed(x: Tensor, norm: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, size, width", [(1, 40, 256), (3, 21, 600), (8, 9, 96), (5, 32, 520)])
@pytest.mark.parametrize("outputs", STAGES)
@pytest.mark.full(
    but=(
        "8-1-40-256-dtype0",
        "8-3-21-600-dtype1",
        "16-8-9-96-dtype1",
        "16-3-21-600-dtype0",
        "32-8-9-96-dtype0",
        "32-5-32-520-dtype0",
        "8-5-32-520-dtype1",
    )
)
def test_a_product_is_that_of_float64(rows: int, size: int, width: int, dtype: torch.dtype, outputs: int) -> None:
    """With each of what may stand around it, in turn."""
    x, weight = random(rows, width).to(dtype), (random(size, width, seed=1) / width**0.5).to(dtype)
    norm, bias = 1 + random(width, seed=2) / 4, random(size, seed=3).to(dtype)
    residual = random(rows, size, seed=4).to(dtype)
    wide, wanted = x.double(), x.double() @ weight.double().T
    near = partial(assert_close, rtol=NEAR[dtype], atol=NEAR[dtype])
    found = few_rows(x, weight, torch.empty(rows, size, dtype=dtype, device=DEVICE), outputs=outputs)
    near(found.double(), wanted)
    few_rows(x, weight, found, norm=norm, eps=EPS, bias=bias, outputs=outputs)
    near(found.double(), normed(wide, norm.double()) @ weight.double().T + bias.double())
    summed = residual.clone()
    assert few_rows(x, weight, summed, residual=summed, bias=bias, outputs=outputs) is summed
    near(summed.double(), wanted + bias.double() + residual.double())


@pytest.mark.parametrize("outputs", STAGES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gate_takes_both_halves_of_the_product(activation: str, outputs: int) -> None:
    x, weight = random(3, 300).bfloat16(), (random(44, 300, seed=1) / 17).bfloat16()
    norm, bias = 1 + random(300, seed=2) / 4, random(44, seed=3)
    both = normed(x.double(), norm.double()) @ weight.double().T + bias.double()
    gate, up = both.chunk(2, -1)
    functional = torch.nn.functional
    gated = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    out = torch.empty(3, 22, dtype=torch.bfloat16, device=DEVICE)
    few_rows(x, weight, out, norm=norm, eps=EPS, bias=bias, activation=activation, outputs=outputs)
    assert_close(out.double(), gated * up, rtol=2.0**-7, atol=2.0**-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outputs", STAGES)
@pytest.mark.full(but=("8-dtype1", "32-dtype0"))
def test_weights_in_8_bits_have_a_scale_for_each_output(dtype: torch.dtype, outputs: int) -> None:
    """Of sizes drawn at random, among them such as end within a step, and within a program."""
    draw = random_module.Random(outputs)
    for rows, kind in ((1, "product"), (3, "gate"), (8, "product"), (5, "gate"), (2, "product")):
        size, width = draw.randrange(1, 40), draw.randrange(1, 900)
        if kind == "gate":
            size += size % 2
        x, weight = random(rows, width).to(dtype), quantise_weight(random(size, width, seed=1) / width**0.5)
        values, scales = weight.values.to(DEVICE), weight.scales.to(DEVICE) * torch.logspace(-1, 1, size)
        norm, bias = 1 + random(width, seed=2) / 4, random(size, seed=3).to(dtype)
        wide = normed(x.double(), norm.double()) @ (values.double() * scales.double()[:, None]).T + bias.double()
        activation, num = ("silu", size // 2) if kind == "gate" else ("", size)
        gate, up = wide[:, :num], wide[:, num:]
        wanted = torch.nn.functional.silu(gate) * up if activation else wide
        residual = random(rows, num, seed=4).to(dtype)
        out = residual.clone()
        around = partial(few_rows, norm=norm, eps=EPS, bias=bias, residual=out, activation=activation)
        around(x, values, out, scales=scales, outputs=outputs)
        assert_close(out.double(), wanted + residual.double(), rtol=NEAR[dtype], atol=NEAR[dtype])


@pytest.mark.parametrize("width, in_8_bits", [(512, False), (600, False), (1024, True), (1100, True)])
@pytest.mark.full(but=("512-False", "1024-True"))
def test_a_row_has_the_same_bits_whatever_other_rows_there_are(width: int, in_8_bits: bool) -> None:
    """However many they are, and however many outputs a program has."""
    x, weight = random(MOST_ROWS, width).bfloat16(), random(24, width, seed=1).bfloat16()
    norm, scales = 1 + random(width, seed=2) / 4, None
    if in_8_bits:
        quantised = quantise_weight(weight.cpu())
        weight, scales = quantised.values.to(DEVICE), quantised.scales.to(DEVICE)

    def of(rows: Tensor, outputs: int) -> Tensor:
        out = torch.empty(len(rows), 12, dtype=torch.float32, device=DEVICE)
        return few_rows(rows, weight, out, scales=scales, norm=norm, eps=EPS, activation="silu", outputs=outputs)

    together = of(x, 16)
    for count, outputs in zip(range(1, MOST_ROWS + 1), cycle(STAGES), strict=False):
        assert torch.equal(of(x[-count:], outputs), together[-count:]), (count, outputs)


def test_rows_may_lie_apart_and_nothing_is_written_between_them() -> None:
    whole, target = random(4, 400), torch.zeros(4, 40, device=DEVICE)
    weight = random(20, 320, seed=1)
    x = whole[:3, 16:336]
    few_rows(x, weight, target[:3, 8:28])
    assert_close(target[:3, 8:28], x @ weight.T, rtol=1e-5, atol=1e-4)
    assert not target[:, :8].any()
    assert not target[:, 28:].any()
    assert not target[3].any()


def test_what_does_not_fit_is_refused_by_name() -> None:
    x, weight = torch.zeros(2, 16, device=DEVICE), torch.zeros(8, 16, device=DEVICE)
    out = torch.zeros(2, 8, device=DEVICE)
    with pytest.raises(EngineError, match="norm has shape"):
        few_rows(x, weight, out, norm=out[0])
    with pytest.raises(EngineError, match=r"weight is torch\.float16"):
        few_rows(x, weight.half(), out)
    with pytest.raises(EngineError, match=r"weight is torch\.float32; the kernel needs torch\.float8_e4m3fn"):
        few_rows(x, weight, out, scales=weight[:, 0].contiguous())
    with pytest.raises(EngineError, match="scales has shape"):
        few_rows(x, weight.to(torch.float8_e4m3fn), out, scales=weight[0, :4])
    with pytest.raises(EngineError, match="out has shape"):
        few_rows(x, weight, out, activation="silu")
    with pytest.raises(EngineError, match="residual has shape"):
        few_rows(x, weight, out, residual=out[:1])
