"""Low-bit weights of several parts, and of inputs in an order of their own."""

import numpy as np
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
    stack_low_bit,
)
from tests.kernels.interface.low_bit.blocks import random_blocks
from tests.kernels.interface.low_bit.group_weights import random_groups


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
