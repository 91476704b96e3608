"""Low-bit formats. Oracle: the package gguf, which llama.cpp's authors keep, bit for bit."""

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from faser.errors import ConfigError
from faser.kernels.interface.low_bit.formats import FORMATS, block_rows, stack_low_bit
from tests.kernels.interface.low_bit.blocks import by_gguf, random_blocks


@pytest.mark.parametrize("name", FORMATS)
def test_every_weight_is_what_the_package_gguf_reads(name: str) -> None:
    weight = random_blocks(name, 12, 768)
    assert np.array_equal(weight.dequantised(), by_gguf(weight))


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_and_sizes_are_ggmls(name: str) -> None:
    found = FORMATS[name]
    assert GGMLQuantizationType(found.number).name == name
    assert GGML_QUANT_SIZES[GGMLQuantizationType(found.number)] == (found.values, found.num_bytes)


@pytest.mark.parametrize("name", FORMATS)
def test_scales_and_minimums_are_floats_without_rounding(name: str) -> None:
    """A product of a half float and an integer of eight bits has at most 19 bits."""
    decoded = FORMATS[name].decode(random_blocks(name, 4, 512).parts[0].blocks)
    for factors in (decoded.scales, decoded.minimums):
        if factors is not None:
            mantissas, _ = np.frexp(factors)
            assert np.array_equal(mantissas * 2.0**19 % 1, np.zeros_like(mantissas))


def test_a_stack_has_the_rows_of_its_parts() -> None:
    parts = [random_blocks("Q4_K", 5, 256), random_blocks("Q6_K", 3, 256), random_blocks("Q8_0", 1, 256)]
    stacked = stack_low_bit(parts)
    assert stacked.shape == (9, 256)
    assert stacked.num_bytes == sum(part.num_bytes for part in parts)
    assert np.array_equal(stacked.dequantised(), np.concatenate([part.dequantised() for part in parts]))


def test_other_formats_and_sizes_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="format is Q2_K; low-bit weights are Q4_0, Q4_1"):
        block_rows("Q2_K", np.zeros((2, 84), np.uint8), 256)
    with pytest.raises(ConfigError, match="row of 288 values in Q4_K has 162 bytes; 256 values take 144"):
        block_rows("Q4_K", np.zeros((2, 162), np.uint8), 288)
    with pytest.raises(ConfigError, match="row of 64 values in Q8_0 has 34 bytes; 32 values take 34"):
        block_rows("Q8_0", np.zeros((2, 34), np.uint8), 64)
