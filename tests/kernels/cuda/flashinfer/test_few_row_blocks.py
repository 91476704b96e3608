"""Units of few rows are those of single operations, and each shape and number of rows takes the way chosen for it.

Bugs these tests have been seen to catch: a way measured in place, so that measuring changed the residual stream; a
choice for one number of rows used for another; a product in 8 bits taken for one in 16; the norm of another unit;
scales of 8 bits left out; a layer in 8 bits cut into units where joined launches are faster.
"""

import pytest
import torch
from torch.testing import assert_close

from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
from faser.kernels.cuda.triton.scaled_fp8 import ScaledFp8
from faser.kernels.interface.forward import SeparateBlocks
from tests.kernels.cuda.flashinfer.chosen import Chosen
from tests.kernels.cuda.triton.layers import Layer, backend_of
from tests.kernels.cuda.triton.rows import DEVICE

_ALL = "out gate_up down qkv"
_NO_KEY = "none"  # with which a key begins


@pytest.mark.parametrize("way", ["separate", "8 outputs", "32 outputs"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.full(but=("False-separate", "True-8 outputs"))
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
    backend = backend_of(None, Chosen("16 outputs", computes=_NO_KEY))
    layer = Layer(backend, torch.bfloat16)
    most = layer.run(backend.blocks, 8)
    for rows in (1, 3, 6):
        for ours, theirs in zip(layer.run(backend.blocks, rows), most, strict=True):
            assert torch.equal(ours, theirs[:rows]), rows


def fp8_backend(choices: Chosen | None) -> FlashInferBackend:
    return backend_of(ScaledFp8(torch.device(DEVICE)), choices)


@pytest.mark.parametrize("rows, in_8_bits, has_bias", [(1, _ALL, True), (3, _ALL, False), (2, "out down", True)])
@pytest.mark.full(but=("1-out gate_up down qkv-True", "2-out down-True"))
def test_a_layer_in_8_bits_is_near_that_of_float64(rows: int, in_8_bits: str, has_bias: bool) -> None:
    """By the weights that the codes stand for: nearer than with rows in 8 bits. Measuring finds all ways right."""
    ours, theirs = fp8_backend(Chosen("units", "16 outputs")), fp8_backend(None)
    layer, other = (Layer(each, torch.bfloat16, fp8=in_8_bits, has_bias=has_bias) for each in (ours, theirs))
    found, rounded = layer.run(ours.blocks, rows), other.run(theirs.blocks, rows)
    for few, many, right in zip(found, rounded, layer.in_float64(rows), strict=True):
        assert_close(few.double(), right, rtol=2.0**-5, atol=2.0**-5)
        if in_8_bits == _ALL:
            assert (few.double() - right).norm() < (many.double() - right).norm() / 2


@pytest.mark.parametrize("way", ["separate", "16 outputs"])
@pytest.mark.full(but=("16 outputs",))
def test_a_layer_with_scales_of_blocks_is_near_that_of_float64(way: str) -> None:
    """Rows stay in 16 bits in every way, and in a step of more rows."""
    chosen = Chosen(way, "tiles")
    backend = fp8_backend(chosen)
    layer = Layer(backend, torch.bfloat16, fp8=_ALL, has_bias=True, block=(32, 16))
    for rows in (2, 9):
        for found, right in zip(layer.run(backend.blocks, rows), layer.in_float64(rows), strict=True):
            assert (found.double() - right).norm() < 0.03 * right.norm(), "roundings to bfloat16"
    assert any("groups of 32 x 16" in key for key in chosen.keys)
    assert any("fp8 in blocks of 32 x 16" in key for key in chosen.keys)


def test_the_bits_of_a_row_by_weights_in_8_bits_do_not_depend_on_the_number_of_rows() -> None:
    backend = fp8_backend(Chosen("units", "16 outputs", computes=_NO_KEY))
    layer = Layer(backend, torch.bfloat16, fp8=_ALL)
    most = layer.run(backend.blocks, 8)
    for rows in (1, 5):
        for few, many in zip(layer.run(backend.blocks, rows), most, strict=True):
            assert torch.equal(few, many[:rows]), rows


def test_a_layer_in_8_bits_is_left_to_its_own_launches_where_these_are_faster() -> None:
    chosen = Chosen("separate", "16 outputs")
    backend, plain = (fp8_backend(each) for each in (chosen, None))
    for in_8_bits, rows in ((_ALL, 2), (_ALL, 2), (_ALL, 1), (_ALL, 9), ("down", 2)):
        found = Layer(backend, torch.bfloat16, fp8=in_8_bits).run(backend.blocks, rows)
        wanted = Layer(plain, torch.bfloat16, fp8=in_8_bits).run(plain.blocks, rows)
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(ours, theirs)
    layers = [key[: len("layer in 8 bits, 2")] for key in chosen.keys if key.startswith("layer")]
    assert layers == ["layer in 8 bits, 2", "layer in 8 bits, 1"], "once each, and only where launches are joined"


def test_logits_by_a_head_in_8_bits_are_those_of_its_codes() -> None:
    backend = fp8_backend(Chosen("16 outputs"))
    layer = Layer(backend, torch.bfloat16, fp8="qkv")
    found = layer.first(backend.blocks, 3, torch.float32)
    assert_close(found.double(), layer.first_in_float64(3), rtol=1e-5, atol=1e-5)
