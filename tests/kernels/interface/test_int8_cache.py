"""Keys and values in int8: the numbers that are stored, and the reference's attention over them."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from faser.kernels.interface.kv_cache import dequantised, quantise_heads
from faser.kernels.interface.shapes import AttentionShape
from faser.kernels.torch_backend import TorchBackend
from tests.kernels.histories import Steps, histories, shapes
from tests.kernels.int8_bounds import most_off, scale_bound, stored_heads
from tests.kernels.layouts import (
    Span,
    attention_shape,
    kv_shape,
    layout_of,
    naive_attention,
    qkv_width,
    shuffled_table,
    step,
)

pytestmark = pytest.mark.usefixtures("one_thread", "seeded")

BACKEND = TorchBackend()


def heads_of_all_sizes() -> Tensor:
    """[N, 16] float32, from what is smallest to what is largest."""
    spread = 2.0 ** torch.linspace(-149, 127, 2000)
    return torch.randn(2000, 16).clamp(-1.9, 1.9) * spread[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_number_is_off_by_half_a_scale_and_nothing_clips(dtype: torch.dtype) -> None:
    x = heads_of_all_sizes().to(dtype)
    codes, scales = quantise_heads(x)
    assert (scales.double() <= scale_bound(x.double())).all()
    assert (scales.double() * (127 + 2.0**-10) >= x.double().abs().amax(-1)).all()
    assert codes.abs().max() == 127
    off = (dequantised(codes, scales).double() - x.double()).abs()
    assert (off <= scales.double()[:, None] * (0.5 + 2.0**-16)).all()


def test_small_integers_are_stored_as_they_are() -> None:
    x = torch.arange(-127, 128).float().repeat(2)[None]
    codes, scales = quantise_heads(x)
    assert scales.item() == 1
    assert torch.equal(dequantised(codes, scales), x)
    assert not dequantised(*quantise_heads(torch.zeros(3, 16))).any()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_its_head_no_number(poison: float) -> None:
    x = torch.ones(2, 16)
    x[0, 3] = poison
    found = dequantised(*quantise_heads(x))
    assert found[0].isnan().all()
    assert_close(found[1], x[1], rtol=2.0**-7, atol=0)


def test_a_block_takes_the_bytes_of_codes_and_scales() -> None:
    size = kv_shape(attention_shape(4, 2, 64), 3, torch.int8)
    cache = BACKEND.allocate_kv(size)
    assert cache.scales is not None
    tensors = (*cache.keys, *cache.values, *cache.scales[0], *cache.scales[1])
    assert sum(each.nbytes for each in tensors) == size.total_bytes
    assert replace(size, dtype=torch.bfloat16).block_bytes / size.block_bytes == 128 / 66


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 5])
def test_attention_is_that_over_the_stored_numbers(window: int | None, dtype: torch.dtype) -> None:
    """Oracle: the formula, in float64, over rounded keys and values."""
    shape = attention_shape(3, 2, 16, window)
    cache, table = BACKEND.allocate_kv(kv_shape(shape, 4, torch.int8)), shuffled_table(1, 4)
    qkv = torch.randn(37, qkv_width(shape)).to(dtype)
    parts = [
        step(BACKEND, cache, shape, layout_of([Span(sequence=0, start=a, rows=n)], table), qkv[a : a + n])
        for a, n in ((0, 20), (20, 1), (21, 16))
    ]
    wanted = naive_attention(stored_heads(qkv, shape), shape)
    near = 1e-5 if dtype is torch.float32 else 2.0**-8
    assert_close(torch.cat(parts).double(), wanted, rtol=near, atol=near)


@settings(max_examples=30, deadline=None)
@given(shape=shapes(), spread=st.sampled_from([0.01, 1.0, 8.0]), seed=st.integers(0, 99))
def test_attention_is_off_by_no_more_than_is_said(shape: AttentionShape, spread: float, seed: int) -> None:
    """Oracle: a cache of float32. spread: from equal weights to scores far apart."""
    rows = 40
    qkv = spread * torch.randn(rows, qkv_width(shape), generator=torch.Generator().manual_seed(seed))
    layout = layout_of([Span(sequence=0, start=0, rows=rows)], shuffled_table(1, 3))
    wanted, found = (
        step(BACKEND, BACKEND.allocate_kv(kv_shape(shape, 3, dtype)), shape, layout, qkv)
        for dtype in (torch.float32, torch.int8)
    )
    assert ((found - wanted).abs() <= most_off(qkv, shape, range(rows)) + 1e-5 * spread).all()


@settings(max_examples=20, deadline=None)
@given(steps=histories(), shape=shapes())
def test_steps_in_blocks_give_what_one_pass_gives(steps: Steps, shape: AttentionShape) -> None:
    """Oracle: a cache of float32 into which rounded numbers were put."""
    table, size = shuffled_table(3, 6), kv_shape(shape, 18, torch.int8)
    cache, wide = BACKEND.allocate_kv(size), BACKEND.allocate_kv(replace(size, dtype=torch.float32))
    for spans in steps:
        layout = layout_of(spans, table)
        qkv = torch.randn(len(layout.positions), qkv_width(shape))
        wanted = step(BACKEND, wide, shape, layout, stored_heads(qkv, shape))
        assert torch.equal(step(BACKEND, cache, shape, layout, qkv), wanted)
