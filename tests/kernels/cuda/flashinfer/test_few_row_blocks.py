"""Units of few rows are those of single operations, and each shape and number of rows takes the way chosen for it.

Bugs these tests have been seen to catch: a way measured in place, so that measuring changed the residual stream; a
choice for one number of rows used for another; a product in 8 bits taken for one in 16; the norm of another unit.
"""

import pytest
import torch
from torch.testing import assert_close

from faser.kernels.interface.forward import SeparateBlocks
from tests.kernels.cuda.flashinfer.chosen import Chosen
from tests.kernels.cuda.triton.layers import Layer, backend_of


@pytest.mark.parametrize("way", ["separate", "8 outputs", "32 outputs"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_is_that_of_single_operations(way: str, has_bias: bool) -> None:
    chosen = Chosen(way)
    backend = backend_of(None, chosen)
    layer = Layer(backend, torch.bfloat16, has_bias=has_bias)
    for rows in (1, 3, 9):
        for follows in (True, False):
            found = layer.run(backend.blocks, rows, follows=follows)
            wanted = layer.run(SeparateBlocks(backend), rows, follows=follows)
            for ours, theirs in zip(found, wanted, strict=True):
                if way == "separate" or rows == 9:
                    assert torch.equal(ours, theirs)
                else:
                    assert_close(ours.float(), theirs.float(), rtol=2.0**-5, atol=2.0**-5)
    assert len(chosen.keys) == len(set(chosen.keys)) == 2 * 4, "four units, with one row and with three"


def test_the_bits_of_a_row_do_not_depend_on_the_number_of_rows() -> None:
    backend = backend_of(None, Chosen("16 outputs"))
    layer = Layer(backend, torch.bfloat16)
    most = layer.run(backend.blocks, 8)
    for rows in range(1, 8):
        for ours, theirs in zip(layer.run(backend.blocks, rows), most, strict=True):
            assert torch.equal(ours, theirs[:rows]), rows


def test_products_in_8_bits_are_left_to_their_own_blocks() -> None:
    from faser.kernels.cuda.triton.scaled_fp8 import ScaledFp8
    from tests.kernels.cuda.triton.rows import DEVICE

    chosen = Chosen("16 outputs")
    backend, plain = (backend_of(ScaledFp8(torch.device(DEVICE)), each) for each in (chosen, None))
    for fp8, follows in (("out gate_up down qkv", True), ("down", False)):
        found = Layer(backend, torch.bfloat16, fp8=fp8).run(backend.blocks, 2, follows=follows)
        wanted = Layer(plain, torch.bfloat16, fp8=fp8).run(plain.blocks, 2, follows=follows)
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(ours, theirs)
    assert chosen.keys == []
