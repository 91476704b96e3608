"""Fused units of a layer with quantised products give the bits of the single operations."""

import pytest
import torch

from faser.kernels.cuda.triton.scaled_fp8 import ScaledFp8
from faser.kernels.interface.forward import SeparateBlocks
from tests.kernels.cuda.triton.layers import Layer, backend_of, expect_same
from tests.kernels.cuda.triton.rows import DEVICE

ALL = "out gate_up down qkv"


@pytest.mark.parametrize("fp8", [ALL, "out gate_up down", "out gate_up qkv", "qkv", ""])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.full(but=("True-out gate_up down qkv", "False-out gate_up qkv", "True-qkv", "False-"))
def test_a_layer_is_that_of_single_operations(fp8: str, has_bias: bool) -> None:
    """Products that a checkpoint left in 16 bits stand among quantised ones."""
    backend = backend_of(ScaledFp8(torch.device(DEVICE)))
    layer = Layer(backend, torch.bfloat16, fp8=fp8, has_bias=has_bias)
    for rows in (1, 3):
        for follows in (True, False):
            found = layer.run(backend.blocks, rows, follows=follows)
            wanted = layer.run(SeparateBlocks(backend), rows, follows=follows)
            for ours, theirs in zip(found, wanted, strict=True):
                expect_same(ours, theirs)


@pytest.mark.parametrize("fp8", [ALL, ""])
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32])
def test_the_product_before_the_first_attention_is_that_of_single_operations(
    fp8: str, out_dtype: torch.dtype
) -> None:
    backend = backend_of(ScaledFp8(torch.device(DEVICE)))
    layer = Layer(backend, torch.float16, fp8=fp8)
    found = layer.first(backend.blocks, 3, out_dtype)
    expect_same(found, layer.first(SeparateBlocks(backend), 3, out_dtype))
