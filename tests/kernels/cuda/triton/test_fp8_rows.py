"""One launch gives the bits of the single kernels one after the other.

Bugs these tests have been seen to catch: no residual, a stream that is not stored, up read from the gate, rows
quantised before they are normalised, a gate of numbers that are not rounded.

Oracle: scale_sums, rms_norm, gate and quantise_rows, each of which has an oracle of its own.

"""

import pytest
import torch
from torch import Tensor

from faser.errors import EngineError
from faser.kernels.cuda.triton.fp8_ops import add_norm, gate, quantise_rows, scale_sums
from faser.kernels.cuda.triton.layer_ops import gate as gate_rows
from faser.kernels.cuda.triton.layer_ops import rms_norm
from faser.kernels.interface.fp8 import FP8, UnscaledProduct
from tests.kernels.cuda.triton.rows import DEVICE

DTYPES = [torch.bfloat16, torch.float16]
ROWS, EPS = 3, 1e-5


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def product_of(width: int, dtype: torch.dtype, *, has_bias: bool) -> UnscaledProduct:
    return UnscaledProduct(
        sums=10 * random(ROWS, width, seed=1),
        row_scales=random(ROWS, seed=2).abs(),
        column_scales=random(width, seed=3).abs(),
        bias=random(width, seed=4).to(dtype) if has_bias else None,
    )


def empty(width: int) -> tuple[Tensor, Tensor]:
    """Values and scales."""
    return torch.empty(ROWS, width, dtype=FP8, device=DEVICE), torch.empty(ROWS, device=DEVICE)


def scaled(product: UnscaledProduct, residual: Tensor | None, out: Tensor) -> Tensor:
    return scale_sums(product.sums, product.row_scales, product.column_scales, product.bias, residual, out)


def same(found: tuple[Tensor, Tensor], x: Tensor) -> None:
    values, scales = empty(x.shape[1])
    quantise_rows(x, values, scales)
    for ours, theirs in zip(found, (values, scales), strict=True):
        if DEVICE == "cuda":  # where kernels may add a row up in other orders: a code may be the next one
            torch.testing.assert_close(ours.float(), theirs.float(), rtol=2.0**-3, atol=2.0**-8)
        else:
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_product, has_bias", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("width", [16, 100])
def test_a_product_enters_the_residual_stream_which_is_normalised_and_quantised(
    width: int, has_product: bool, has_bias: bool, dtype: torch.dtype
) -> None:
    whole, weight = random(ROWS, width + 9).to(dtype), (1 + random(width, seed=5)).to(dtype)
    hidden = whole[:, 4 : 4 + width]
    product = product_of(width, dtype, has_bias=has_bias) if has_product else None
    wanted = hidden.clone()
    if product is not None:
        scaled(product, wanted, wanted)
    before, found = whole.clone(), empty(width)
    add_norm(product, hidden, weight, EPS, *found)
    assert torch.equal(hidden, wanted)
    assert torch.equal(whole[:, :4], before[:, :4])
    assert torch.equal(whole[:, 4 + width :], before[:, 4 + width :])
    same(found, rms_norm(wanted, weight, EPS, torch.empty_like(wanted)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("width", [16, 100])
def test_a_product_is_gated_and_quantised(width: int, has_bias: bool, dtype: torch.dtype) -> None:
    product, found = product_of(2 * width, dtype, has_bias=has_bias), empty(width)
    gate(product, dtype, *found)
    gate_up = scaled(product, None, torch.empty(ROWS, 2 * width, dtype=dtype, device=DEVICE))
    same(found, gate_rows(gate_up, torch.empty(ROWS, width, dtype=dtype, device=DEVICE)))


def test_what_does_not_fit_is_refused_by_name() -> None:
    product, found = product_of(16, torch.float16, has_bias=False), empty(16)
    hidden, weight = random(ROWS, 16).half(), random(16).half()
    with pytest.raises(EngineError, match="weight has shape"):
        add_norm(None, hidden, weight[:8], EPS, *found)
    with pytest.raises(EngineError, match="sums has shape"):
        add_norm(product_of(8, torch.float16, has_bias=False), hidden, weight, EPS, *found)
    with pytest.raises(EngineError, match="sums has shape"):
        gate(product, torch.float16, *found)
