"""Rows are quantised to the same bits as the definition gives, in kernels/interface/fp8.py.

Bugs these tests have been seen to catch: ties rounded up, mantissas cut off, an exponent one too large, subnormals
taken for normals, no number that is not one, signs lost, the largest value for the largest magnitude, rows read as
if they lay in line, a column too many, the reciprocal of the scale for its quotient.
"""

import pytest
import torch
from torch import Tensor

from faser.errors import EngineError
from faser.kernels.cuda.triton.common import WIDEST_ROW
from faser.kernels.cuda.triton.fp8_ops import quantise_rows
from faser.kernels.interface.fp8 import FP8, FP8_MAX
from faser.kernels.interface.fp8 import quantise_rows as defined
from tests.kernels.cuda.triton.rows import DEVICE

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def by_kernel(x: Tensor) -> tuple[Tensor, Tensor]:
    """Bits of the values, and the scales."""
    values = torch.empty(x.shape, dtype=FP8, device=DEVICE)
    scales = torch.empty(len(x), device=DEVICE)
    quantise_rows(x.to(DEVICE), values, scales)
    return values.view(torch.uint8).cpu(), scales.cpu()


def check(x: Tensor) -> None:
    values, scales = by_kernel(x)
    wanted = defined(x)
    assert torch.equal(scales, wanted.scales)
    assert torch.equal(values, wanted.values.view(torch.uint8))


def random(*size: int, spread: float) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(size, generator=generator) * (spread * torch.randn(size, generator=generator)).exp()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 100, 576])
@pytest.mark.parametrize("spread", [0.0, 1.5])
def test_rows_have_the_bits_of_the_definition(width: int, spread: float, dtype: torch.dtype) -> None:
    check(random(4, width, spread=spread).to(dtype))


def test_every_number_of_the_type_and_every_middle_between_two_is_rounded_alike() -> None:
    numbers = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    near = torch.cat([torch.nextafter(middles, numbers[:-1]), torch.nextafter(middles, numbers[1:])])
    positive = torch.cat([numbers, middles, near])
    assert positive.max() == FP8_MAX, "the scale is 1, so that these numbers are what is rounded"
    check(torch.cat([positive, -positive])[None])


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-30, 1e30])
def test_rows_of_zeros_and_of_extremes_are_no_trouble(size: float) -> None:
    check(torch.full((2, 16), size))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_has_a_value_that_is_not_a_number(bad: float) -> None:
    x = random(3, 32, spread=1.0)
    x[1, 7] = bad
    values, scales = by_kernel(x)
    assert values.view(FP8).float().isnan().any(1).tolist() == [False, True, False]
    others = defined(x[[0, 2]])
    assert torch.equal(scales[[0, 2]], others.scales)
    assert torch.equal(values[[0, 2]], others.values.view(torch.uint8))


def test_rows_may_lie_apart() -> None:
    whole = random(4, 96, spread=1.0)
    check(whole[:, 16:80])


def test_no_rows_are_no_trouble() -> None:
    values, scales = by_kernel(torch.empty(0, 16))
    assert (values.shape, scales.shape) == ((0, 16), (0,))


def test_what_does_not_fit_is_refused_by_name() -> None:
    x, scales = torch.zeros(2, 16, device=DEVICE), torch.empty(2, device=DEVICE)
    values = torch.empty(2, 16, dtype=FP8, device=DEVICE)
    with pytest.raises(EngineError, match=r"values is torch\.float32"):
        quantise_rows(x, x, scales)
    with pytest.raises(EngineError, match="scales has shape"):
        quantise_rows(x, values, scales[:1])
    with pytest.raises(EngineError, match=f"at most {WIDEST_ROW}"):
        quantise_rows(torch.zeros(1, WIDEST_ROW + 1, device=DEVICE), values, scales)
