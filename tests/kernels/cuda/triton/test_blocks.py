"""A layer of few rows is near that of single operations, in float64's sight; other layers are left to the others.

Bugs these tests have been seen to catch: the squares of the stream before the feed-forward network, another
product's norm and weights, no residual, nine rows, one quantised product among others.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from faser.kernels.cuda.triton.few_rows import FewRowBlocks
from faser.kernels.cuda.triton.scaled_fp8 import ScaledFp8
from faser.kernels.interface.backend import SeparateBlocks
from faser.kernels.interface.shapes import PackedLinear
from tests.kernels.cuda.triton.layers import EPS, HEADS, HIDDEN, Layer, backend_of, expect_same, random
from tests.kernels.cuda.triton.rows import DEVICE

DTYPES = [torch.bfloat16, torch.float16]
UNIT = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def exact(layer: Layer, dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor]:
    """What Layer.run computes, in float64."""

    def linear(x: Tensor, packed: PackedLinear) -> Tensor:
        weight, bias = packed.weight, packed.bias
        found: Tensor = x @ weight.double().t()
        return found if bias is None else found + bias.double()

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()

    block, following = layer.feed_forward, layer.following
    hidden = random(rows, HIDDEN, seed=4).to(dtype).double()
    hidden = hidden + linear(random(rows, HEADS, seed=5).to(dtype).double(), block.attention_out)
    gate, up = linear(norm(hidden, block.gate_up.norm), block.gate_up.linear).chunk(2, dim=1)
    hidden = hidden + linear(functional.silu(gate) * up, block.down)
    return hidden, linear(norm(hidden, following.norm), following.linear)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 8])
def test_a_layer_of_few_rows_is_as_near_as_that_of_single_operations(
    rows: int, has_bias: bool, dtype: torch.dtype
) -> None:
    """Oracle: float64."""
    backend = backend_of(None, few_rows=True)
    assert isinstance(backend.blocks, FewRowBlocks)
    layer = Layer(backend, dtype, has_bias=has_bias)
    wanted = exact(layer, dtype, rows)
    found, plain = layer.run(backend.blocks, rows), layer.run(SeparateBlocks(backend), rows)
    for ours, theirs, value in zip(found, plain, wanted, strict=True):
        bound = 1.5 * (theirs.double() - value).norm() + UNIT[dtype] * value.norm() / 4
        assert (ours.double() - value).norm() <= bound < 0.05 * value.norm()
    ours, nothing = layer.run(backend.blocks, rows, follows=False)
    assert torch.equal(ours, found[0])
    assert not nothing.any()


@pytest.mark.parametrize("rows, fp8", [(9, ""), (3, "out gate_up down qkv"), (3, "down"), (3, "qkv")])
def test_more_rows_and_quantised_products_are_left_to_others(rows: int, fp8: str) -> None:
    fewer, others = (backend_of(ScaledFp8(torch.device(DEVICE)), few_rows=few_rows) for few_rows in (True, False))
    layer = Layer(fewer, torch.float16, fp8=fp8)
    found, wanted = layer.run(fewer.blocks, rows), layer.run(others.blocks, rows)
    if fp8 == "qkv":
        torch.testing.assert_close(found[0], wanted[0], rtol=2.0**-8, atol=2.0**-8)
        return
    for ours, theirs in zip(found, wanted, strict=True):
        expect_same(ours, theirs)


@pytest.mark.parametrize("rows, out_dtype", [(3, torch.float16), (3, torch.float32), (9, torch.float16)])
def test_the_product_before_the_first_attention_and_that_of_the_head(rows: int, out_dtype: torch.dtype) -> None:
    backend = backend_of(None, few_rows=True)
    layer = Layer(backend, torch.float16)
    found = layer.first(backend.blocks, rows, out_dtype)
    wanted = layer.first(SeparateBlocks(backend), rows, torch.float16)
    torch.testing.assert_close(found.half(), wanted, rtol=2.0**-9, atol=2.0**-9)


def test_they_are_off_unless_asked_for() -> None:
    assert not isinstance(backend_of(None).blocks, FewRowBlocks)
