"""Normalised rows are those of the torch backend.

float32 within the error of summing in another order; 16-bit types within two roundings, which the interpreter cuts
off and a GPU rounds.

Bugs these tests have been seen to catch: the mean over the padded width, eps left out, a weight by
row, rows of x or out taken to lie in line, a column too many.
"""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from faser.errors import EngineError
from faser.kernels.cuda.triton.common import WIDEST_ROW
from faser.kernels.cuda.triton.layer_ops import rms_norm
from tests.kernels.cuda.triton.rows import DEVICE

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NEAR = {torch.float32: 2e-6, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def wanted(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [1e-6, 0.5])
@pytest.mark.parametrize("rows, width", [(1, 1), (3, 100), (2, 576)])
def test_rows_are_normalised(rows: int, width: int, eps: float, dtype: torch.dtype) -> None:
    """Oracle: float64. A weight of the type of the rows and one of float32; also added to a stream, in place."""
    x, weight = (3 * random(rows, width)).to(dtype), 1 + random(width, seed=1)
    out, stream = torch.empty_like(x), random(rows, width, seed=2).to(dtype)
    for each in (weight, weight.to(dtype)):
        assert rms_norm(x, each, eps, out) is out
        assert_close(out.double(), wanted(x, each, eps), rtol=NEAR[dtype], atol=NEAR[dtype] / 16)
    added = stream.double() + wanted(x, weight, eps)
    rms_norm(x, weight, eps, stream, stream)
    assert_close(stream.double(), added, rtol=NEAR[dtype], atol=4 * NEAR[dtype])


def test_rows_may_lie_apart_and_out_may_be_x() -> None:
    whole, target, weight = random(4, 96), torch.zeros(4, 80, device=DEVICE), random(64, seed=1)
    x = whole[:, 16:80]
    expected = wanted(x, weight, 1e-5).float()
    rms_norm(x, weight, 1e-5, target[:, 8:72])
    assert_close(target[:, 8:72], expected)
    assert not target[:, :8].any()
    assert not target[:, 72:].any()
    rms_norm(x, weight, 1e-5, x)
    assert_close(x, expected)


def test_a_row_has_the_same_bits_whatever_other_rows_there_are() -> None:
    x, weight = random(5, 100), random(100, seed=1)
    together = rms_norm(x, weight, 1e-5, torch.empty_like(x))
    for row in range(5):
        alone = rms_norm(x[row : row + 1], weight, 1e-5, torch.empty(1, 100, device=DEVICE))
        assert torch.equal(alone[0], together[row])


def test_no_rows_are_no_trouble() -> None:
    x = torch.empty(0, 16, device=DEVICE)
    assert rms_norm(x, torch.ones(16, device=DEVICE), 1e-5, x).shape == (0, 16)


def test_what_does_not_fit_is_refused_by_name() -> None:
    x, weight = torch.zeros(2, 16, device=DEVICE), torch.zeros(16, device=DEVICE)
    with pytest.raises(EngineError, match="weight has shape"):
        rms_norm(x, weight[:8], 1e-5, x)
    with pytest.raises(EngineError, match=r"weight is torch\.float16"):
        rms_norm(x, weight.half(), 1e-5, x)
    with pytest.raises(EngineError, match="out has shape"):
        rms_norm(x, weight, 1e-5, x[:1])
    wide = torch.zeros(1, WIDEST_ROW + 1, device=DEVICE)
    with pytest.raises(EngineError, match=f"at most {WIDEST_ROW}"):
        rms_norm(wide, wide[0], 1e-5, wide)
