"""Keys and values in 8-bit floats: the numbers that are stored, and attention over them.

Bugs these tests have been seen to catch: what is no number becoming one,
another type's rounding, bounds of half the size or without small numbers, bytes read as numbers, only keys copied.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from faser.errors import ConfigError
from faser.kernels.interface.fp8 import FP8
from faser.kernels.interface.kv_cache import as_bytes, check_cache_dtype, stored
from faser.kernels.interface.shapes import AttentionShape
from faser.kernels.torch_backend import TorchBackend
from tests.kernels.histories import Steps, histories, shapes
from tests.kernels.layouts import (
    BLOCK_SIZE,
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


def rounding(x: Tensor) -> Tensor:
    """The bound on the error of `stored`, float32, for |x| <= 448."""
    return (x.float().abs() / 16).clamp_min(2.0**-10)


def every_bfloat16() -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def nearest(x: Tensor) -> Tensor:
    """Oracle: the nearest of all finite numbers of the type; of two, the one whose last bit is zero."""
    codes = torch.arange(127)  # from zero to 448
    numbers = codes.to(torch.uint8).view(FP8).double()
    distance = (x.double().abs().clamp_max(500)[:, None] - numbers).abs()
    tied = distance == distance.amin(-1, keepdim=True)
    even = torch.where(tied, 2 - codes % 2, 0).argmax(-1)
    return numbers[even].copysign(x.double())


def test_every_16_bit_number_becomes_the_nearest_one_and_stays_finite() -> None:
    x = every_bfloat16()
    found = stored(x, FP8)
    assert found.dtype is FP8
    assert torch.equal(found.float().isnan(), x.isnan())
    x, found = x[~x.isnan()], found[~x.isnan()]
    wanted = nearest(x)
    assert torch.equal(found.double(), wanted)
    assert torch.equal(found.float().signbit(), x.signbit())


def test_rounding_is_off_by_no_more_than_is_said() -> None:
    x = every_bfloat16()
    x = x[x.float().abs() <= 448]
    assert ((stored(x, FP8).float() - x.float()).abs() <= rounding(x)).all()


def test_what_has_the_caches_type_is_stored_as_it_is() -> None:
    x = torch.randn(3).half()
    assert stored(x, torch.float16) is x
    assert as_bytes(x) is x


def rounded(qkv: Tensor, shape: AttentionShape) -> Tensor:
    """With the keys and values that a cache of 8-bit floats would give back."""
    found, first = qkv.clone(), shape.num_heads * shape.head_dim
    found[:, first:] = stored(qkv[:, first:], FP8).float()
    return found


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("group", [1, 3])
def test_attention_is_that_over_the_stored_numbers(group: int, window: int | None) -> None:
    """Oracle: the formula, in float64, over rounded keys and values."""
    shape = attention_shape(group, 2, 16, window)
    cache = BACKEND.allocate_kv(kv_shape(shape, 4, FP8))
    qkv = torch.randn(37, qkv_width(shape))
    parts = [
        step(
            BACKEND, cache, shape, layout_of([Span(sequence=0, start=start, rows=rows)], table), qkv[start:][:rows]
        )
        for table in [shuffled_table(1, 4)]
        for start, rows in ((0, 20), (20, 1), (21, 16))
    ]
    wanted = naive_attention(rounded(qkv, shape), shape)
    assert_close(torch.cat(parts).double(), wanted, rtol=1e-5, atol=1e-5)


def most_off(qkv: Tensor, shape: AttentionShape) -> Tensor:
    """[R, Hq * D] of one sequence: the bound in fp8_cache's docstring."""
    heads, group = qkv.view(len(qkv), -1, shape.head_dim), shape.num_heads // shape.num_kv_heads
    out = torch.zeros(len(qkv), shape.num_heads, shape.head_dim)
    for row in range(len(qkv)):
        first = 0 if shape.window is None else max(0, row - shape.window + 1)
        for head in range(shape.num_heads):
            keys = heads[first : row + 1, shape.num_heads + head // group]
            values = heads[first : row + 1, shape.num_heads + shape.num_kv_heads + head // group]
            change = shape.scale * (rounding(keys) @ heads[row, head].abs()).max()
            distance = values.amax(0) - values.amin(0)
            out[row, head] = rounding(values).amax(0) + math.tanh(change / 2) * distance
    return out.view(len(qkv), -1)


@settings(max_examples=30, deadline=None)
@given(shape=shapes(), spread=st.sampled_from([0.01, 1.0, 8.0]), seed=st.integers(0, 99))
def test_attention_is_off_by_no_more_than_is_said(shape: AttentionShape, spread: float, seed: int) -> None:
    """Oracle: a cache of float32. spread: from numbers that are subnormal to scores far apart."""
    rows = 40
    qkv = spread * torch.randn(rows, qkv_width(shape), generator=torch.Generator().manual_seed(seed))
    layout = layout_of([Span(sequence=0, start=0, rows=rows)], shuffled_table(1, 3))
    wanted, found = (
        step(BACKEND, BACKEND.allocate_kv(kv_shape(shape, 3, dtype)), shape, layout, qkv)
        for dtype in (torch.float32, FP8)
    )
    assert ((found - wanted).abs() <= most_off(qkv, shape) + 1e-5 * spread).all()


def test_the_bound_of_moved_attention_is_reached() -> None:
    """Two positions: scores of -e / 2 and e / 2 that change places."""
    change = 0.7
    before = torch.tensor([-change / 2, change / 2]).softmax(0)
    after = torch.tensor([change / 2, -change / 2]).softmax(0)
    assert_close((after - before)[0].item(), math.tanh(change / 2))


@settings(max_examples=20, deadline=None)
@given(steps=histories(), shape=shapes())
def test_steps_in_blocks_give_what_one_pass_gives(steps: Steps, shape: AttentionShape) -> None:
    """Oracle: a cache of float32 into which rounded numbers were put."""
    table = shuffled_table(3, 6)
    size = kv_shape(shape, 18, FP8)
    cache, wide = BACKEND.allocate_kv(size), BACKEND.allocate_kv(replace(size, dtype=torch.float32))
    for spans in steps:
        layout = layout_of(spans, table)
        qkv = torch.randn(len(layout.positions), qkv_width(shape))
        wanted = step(BACKEND, wide, shape, layout, rounded(qkv, shape))
        assert torch.equal(step(BACKEND, cache, shape, layout, qkv), wanted)


def test_a_cache_takes_half_the_memory_of_one_in_16_bits() -> None:
    size = kv_shape(attention_shape(4, 2, 64), 3, FP8, BLOCK_SIZE)
    cache = BACKEND.allocate_kv(size)
    assert sum(each.nbytes for each in (*cache.keys, *cache.values)) == size.total_bytes
    assert 2 * size.total_bytes == replace(size, dtype=torch.bfloat16).total_bytes


def test_a_type_without_kernels_is_named_with_those_that_have_some() -> None:
    check_cache_dtype("good", FP8, (torch.bfloat16, FP8))
    with pytest.raises(
        ConfigError, match="the good backend keeps keys and values in bfloat16 and float8_e4m3fn; "
    ):
        check_cache_dtype("good", torch.float8_e5m2, (torch.bfloat16, FP8))
