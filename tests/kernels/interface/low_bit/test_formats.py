"""Low-bit formats. Oracle: the package gguf, which llama.cpp's authors keep, bit for bit."""

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from faser.kernels.interface.low_bit.formats import FORMATS
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
    decoded = random_blocks(name, 4, 512).parts[0].decode()
    for factors in (decoded.scales, decoded.minimums):
        if factors is not None:
            mantissas, _ = np.frexp(factors.products)
            assert np.array_equal(mantissas * 2.0**19 % 1, np.zeros_like(mantissas))
