"""Weights of codes with scales. Oracle: the formula of a weight, value by value, in float64.

Weights rounded while they are loaded. Oracles: float64, and scales and minimums searched by brute force.

Low-bit weights of several parts, and of inputs in an order of their own.
"""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from faser.errors import ConfigError
from faser.kernels.interface.low_bit.rows import (
    INT4,
    INT8,
    FloatRows,
    LowBitRows,
    block_rows,
    can_stack,
    group_rows,
    quantise,
    stack_low_bit,
)
from tests.kernels.interface.low_bit.blocks import random_blocks
from tests.kernels.interface.low_bit.group_weights import random_groups


@pytest.mark.parametrize(
    "depth, num_groups, in_memory", [(128, 4, 32), (192, 2, 32), (384, 3, 128), (1024, 2, 256), (576, 1, 256)]
)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_is_its_code_less_the_zero_point_times_its_groups_scale(
    bits: int, depth: int, num_groups: int, in_memory: int
) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 1 << bits, (3, depth), np.uint8)
    scales, minimums = (rng.integers(1, 64, (3, num_groups)).astype(np.float32) for _ in range(2))
    found = group_rows(codes, bits=bits, zero_point=5, scales=scales, minimums=minimums)
    wanted = np.zeros((3, depth))
    for row in range(3):
        for k in range(depth):
            group = k // (depth // num_groups)
            wanted[row, k] = (int(codes[row, k]) - 5) * float(scales[row, group]) + float(minimums[row, group])
    assert np.array_equal(found.decode().dequantised(), wanted)
    assert found.group_size == in_memory
    assert found.decode().group == 32


def test_factors_are_half_floats_only_where_none_is_rounded() -> None:
    codes, scales = np.zeros((2, 64), np.uint8), np.full((2, 2), 0.25, np.float32)
    halves = group_rows(codes, bits=4, zero_point=8, scales=scales)
    assert halves.has_half_factors
    assert halves.num_bytes == 64 + 2 * 4
    odd = np.array([[0.25, 0.1], [1, 1]], np.float32)
    for floats in (
        group_rows(codes, bits=4, zero_point=8, scales=odd),
        group_rows(codes, bits=4, zero_point=8, scales=scales, minimums=odd),
        group_rows(codes, bits=4, zero_point=8, scales=scales * np.float32(1e6)),
    ):
        assert not floats.has_half_factors


def test_what_no_product_takes_is_refused_with_its_number() -> None:
    codes = np.zeros((2, 96), np.uint8)
    with pytest.raises(ConfigError, match="codes of 3 bits; low-bit products have 4 or 8"):
        group_rows(codes, bits=3, zero_point=0, scales=np.ones((2, 1), np.float32))
    with pytest.raises(
        ConfigError, match="a group has 16 values; low-bit products have groups of multiples of 32"
    ):
        group_rows(codes, bits=4, zero_point=0, scales=np.ones((2, 6), np.float32))
    with pytest.raises(ConfigError, match=r"a weight of \[2, 96\] has scales of \[2, 5\]"):
        group_rows(codes, bits=4, zero_point=0, scales=np.ones((2, 5), np.float32))


Wide = npt.NDArray[np.float64]


def weights(rows: int, depth: int, seed: int = 0) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, depth)) * rng.uniform(0.01, 0.1, (rows, 1))).astype(np.float32)


def misses(weight: npt.NDArray[np.float32], found: npt.NDArray[np.float32], size: int) -> Wide:
    """[N, groups]: sums of squares."""
    squares: Wide = (weight.astype(np.float64) - found) ** 2
    sums: Wide = squares.reshape(len(weight), -1, size).sum(2)
    return sums


def of_a_line(group: Wide, scale: float, minimum: float) -> float:
    codes = np.clip(np.rint((group - minimum) / scale), 0, 15)
    return float(((codes * scale + minimum - group) ** 2).sum())


def test_int8_is_off_by_half_a_step_of_its_group() -> None:
    """A step is the largest of 32 values over 127, and its rounding to a half float moves it by 2 ** -11."""
    weight = weights(9, 160)
    found = quantise(weight, INT8)
    assert (found.scales.astype(np.float16) == found.scales).all()
    largest = np.abs(weight).reshape(9, -1, 32).max(2)
    off = np.abs(found.decode().dequantised() - weight).reshape(9, -1, 32).max(2)
    assert (off <= largest / 127 * (0.5 + 127 * 2.0**-11 + 1e-6)).all()
    assert (off >= largest / 127 * 0.3).all()
    codes = found.codes.astype(int) - 128
    assert abs(codes).max() == 127


def test_int4_misses_less_than_plain_rounding_and_hardly_more_than_the_best_line() -> None:
    """Oracle: 60 x 60 scales and minimums for each group. Bug seen to be caught: the last line tried is kept."""
    weight = weights(4, 96)
    found = misses(weight, quantise(weight, INT4).decode().dequantised(), 32)
    plain, best = np.zeros_like(found), np.zeros_like(found)
    for row in range(4):
        for number in range(3):
            group = weight[row, 32 * number : 32 * number + 32].astype(np.float64)
            low, span = group.min(), group.max() - group.min()
            plain[row, number] = of_a_line(group, span / 15, low)
            best[row, number] = min(
                of_a_line(group, span / 15 * a, low + span / 15 * b)
                for a in np.linspace(0.75, 1.15, 60)
                for b in np.linspace(-0.5, 2.0, 60)
            )
    assert (found <= plain * 1.001).all()
    assert found.sum() < 0.93 * plain.sum()
    assert found.sum() < 1.1 * best.sum()


@pytest.mark.parametrize("value", [0.0, 0.25, -3.0, 1e-6])
def test_a_group_of_one_value_is_that_value(value: float) -> None:
    weight = np.full((1, 32), value, np.float32)
    assert np.allclose(quantise(weight, INT4).decode().dequantised(), weight, rtol=2.0**-11, atol=2.0**-25)
    assert np.allclose(quantise(weight, INT8).decode().dequantised(), weight, rtol=2.0**-8, atol=2.0**-18)


def test_values_on_a_line_of_half_floats_are_kept() -> None:
    codes = np.random.default_rng(1).integers(0, 16, (5, 64))
    codes[:, ::32], codes[:, 1::32] = 0, 15
    weight = (codes * 0.125 - 0.75).astype(np.float32)
    found = quantise(weight, INT4)
    assert np.array_equal(found.decode().dequantised(), weight)
    assert np.array_equal(found.codes, codes)


def test_sizes_are_those_of_the_packed_rows() -> None:
    rows = FloatRows(weight=torch.from_numpy(weights(3, 96)), scheme=INT4)
    assert (rows.num_rows, rows.depth) == (3, 96)
    assert rows.num_bytes == quantise(weights(3, 96), INT4).num_bytes
    assert np.array_equal(rows.decode().codes, quantise(weights(3, 96), INT4).codes)


def test_a_stack_has_the_rows_of_its_parts() -> None:
    parts = [
        random_blocks("Q4_K", 5, 256),
        random_blocks("Q6_K", 3, 256),
        random_groups(4, 2, 256, group_size=128),
        LowBitRows(parts=(FloatRows(weight=torch.randn(4, 256), scheme=INT4),)),
        LowBitRows(parts=(FloatRows(weight=torch.randn(1, 256), scheme=INT8),)),
    ]
    stacked = stack_low_bit(parts)
    assert stacked.shape == (15, 256)
    assert stacked.num_bytes == sum(part.num_bytes for part in parts)
    assert np.array_equal(stacked.dequantised(), np.concatenate([part.dequantised() for part in parts]))


def test_columns_are_given_in_the_order_of_their_inputs() -> None:
    """Oracle: a product with the inputs in the columns' order."""
    weight = random_groups(4, 6, 64, group_size=32, has_order=True)
    assert weight.order is not None
    x = np.random.default_rng(0).standard_normal(64)
    columns = weight.parts[0].decode().dequantised().astype(np.float64)
    assert np.allclose(weight.dequantised() @ x, columns @ x[weight.order])


def test_only_weights_of_one_order_are_stacked() -> None:
    plain, first = random_groups(4, 2, 64, group_size=32), random_groups(4, 2, 64, group_size=32, has_order=True)
    other = random_groups(4, 2, 64, group_size=32, has_order=True, seed=1)
    assert first.order is not None
    assert can_stack([plain, plain])
    assert can_stack([first, first])
    assert not can_stack([first, other])
    assert not can_stack([first, plain])
    assert not can_stack([plain, first])
    stacked = stack_low_bit([first, first]).order
    assert stacked is not None
    assert np.array_equal(stacked, first.order)


def test_other_formats_and_sizes_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="format is Q2_K; low-bit weights are Q4_0, Q4_1"):
        block_rows("Q2_K", np.zeros((2, 84), np.uint8), 256)
    with pytest.raises(ConfigError, match="row of 288 values in Q4_K has 162 bytes; 256 values take 144"):
        block_rows("Q4_K", np.zeros((2, 162), np.uint8), 288)
    with pytest.raises(ConfigError, match="row of 64 values in Q8_0 has 34 bytes; 32 values take 34"):
        block_rows("Q8_0", np.zeros((2, 34), np.uint8), 64)
