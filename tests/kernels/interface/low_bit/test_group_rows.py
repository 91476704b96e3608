"""Weights of codes with scales. Oracle: the formula of a weight, value by value, in float64."""

import numpy as np
import pytest

from faser.errors import ConfigError
from faser.kernels.interface.low_bit.rows import group_rows


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
