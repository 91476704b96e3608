"""Integers out of 32-bit words. Oracles: words written down by hand, and shifts of Python's integers."""

import numpy as np
import torch

from faser.engine.execution.models.stored_codes import awq_codes, codes_of_bytes, codes_of_words


def int32(*values: int) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.uint32).view(np.int32))


def test_words_of_four_and_of_eight_bits_are_read_from_the_lowest_bits_on() -> None:
    words = int32(0x76543210, 0xFEDCBA98).reshape(1, 2)
    assert codes_of_words(words, 4).tolist() == [list(range(16))]
    words = int32(0xFF00807F, 0x04030201).reshape(2, 1)
    assert codes_of_words(words, 8).tolist() == [[0x7F, 0x80, 0x00, 0xFF], [1, 2, 3, 4]]


def test_words_of_awq_hold_even_columns_first() -> None:
    """WQLinear_GEMM packs columns 0 2 4 6 1 3 5 7."""
    found = awq_codes(int32(0x76543210, 0x0000000F).reshape(1, 2))
    assert found[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 15, 0, 0, 0, 0, 0, 0, 0]


def test_inputs_of_awq_are_rows_of_words() -> None:
    words = int32(0x00000001, 0x00000002, 0xF0000003).reshape(3, 1)
    found = awq_codes(words)
    assert found.shape == (8, 3)
    assert found[0].tolist() == [1, 2, 3]
    assert found[7].tolist() == [0, 0, 15]


def test_signed_bytes_become_codes_128_higher() -> None:
    assert codes_of_bytes(torch.tensor([[-128, -1, 0, 127]], dtype=torch.int8)).tolist() == [[0, 127, 128, 255]]
