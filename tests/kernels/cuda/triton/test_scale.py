"""Sums become products: both scales, the bias and the residual, against the same in float32 by torch.

The same bits in float32 and float16; bfloat16 within a unit in the last place, which the interpreter cuts off and
a GPU rounds.

Bugs these tests have been seen to catch: a scale left out, one for all columns, rows of residual or output taken
to lie in line, only the first columns of a row, a bias by row.
"""

import pytest
import torch
from torch import Tensor

from faser.errors import EngineError
from faser.kernels.cuda.triton.fp8_ops import scale_sums
from tests.kernels.cuda.triton.rows import DEVICE

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def check(found: Tensor, wanted: Tensor) -> None:
    if found.dtype is torch.bfloat16:
        torch.testing.assert_close(found.float(), wanted, rtol=2.0**-7, atol=0)
    else:
        assert torch.equal(found, wanted.to(found.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("residual", ["none", "another", "out"])
@pytest.mark.parametrize("rows, width", [(1, 16), (3, 1500)])
def test_sums_are_scaled_and_added_to(
    rows: int, width: int, residual: str, has_bias: bool, dtype: torch.dtype
) -> None:
    sums, row_scales, column_scales = random(rows, width), random(rows, seed=1), random(width, seed=2)
    bias = random(width, seed=3).to(dtype) if has_bias else None
    out = random(rows, width, seed=4).to(dtype)
    before = {"none": None, "another": random(rows, width, seed=5).to(dtype), "out": out}[residual]
    wanted = sums * row_scales[:, None] * column_scales
    for addend in (bias, before):
        wanted = wanted if addend is None else wanted + addend.float()
    assert scale_sums(sums, row_scales, column_scales, bias, before, out) is out
    check(out, wanted)


def test_rows_of_output_and_residual_may_lie_apart() -> None:
    sums, row_scales, column_scales = random(4, 40), random(4, seed=1), random(40, seed=2)
    out, residual = random(4, 64, seed=3), random(4, 100, seed=4)
    around = out.clone()
    scale_sums(sums, row_scales, column_scales, None, residual[:, 20:60], out[:, 8:48])
    around[:, 8:48] = sums * row_scales[:, None] * column_scales + residual[:, 20:60]
    assert torch.equal(out, around)


def test_no_rows_are_no_trouble() -> None:
    out = torch.empty(0, 16, device=DEVICE)
    assert scale_sums(random(0, 16), random(0), random(16), None, None, out) is out


def test_what_does_not_fit_is_refused_by_name() -> None:
    sums, rows, columns, out = random(2, 16), random(2), random(16), random(2, 16)
    with pytest.raises(EngineError, match=r"sums is torch\.float16"):
        scale_sums(sums.half(), rows, columns, None, None, out)
    with pytest.raises(EngineError, match="row_scales has shape"):
        scale_sums(sums, columns, columns, None, None, out)
    with pytest.raises(EngineError, match="column_scales has shape"):
        scale_sums(sums, rows, rows, None, None, out)
    with pytest.raises(EngineError, match="bias has shape"):
        scale_sums(sums, rows, columns, rows, None, out)
    with pytest.raises(EngineError, match=r"residual is torch\.float16"):
        scale_sums(sums, rows, columns, None, out.half(), out)
    with pytest.raises(EngineError, match="out has shape"):
        scale_sums(sums, rows, columns, None, None, out[:, :8])
