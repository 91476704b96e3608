"""Products of few rows against float64, and against the single kernels for what is fused into them.

Bugs these tests have been seen to catch: squares counted twice, of the first program only, stored in one place or
of other numbers than the stored ones; rows of x, residual or out taken to lie in line; up with the gate's weights
or bias; the last piece of the weights left out; gate and up swapped; one weight of the norm for all columns.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from faser.errors import EngineError
from faser.kernels.cuda.triton.few_rows import MOST_ROWS, FewRowsProduct, RowNorm, Squares
from faser.kernels.cuda.triton.layer_ops import rms_norm
from tests.kernels.cuda.triton.rows import DEVICE

NEAR = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 1e-5}
DTYPES = [torch.bfloat16, torch.float16]
EPS = 1e-5
PRODUCT = FewRowsProduct(2)


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def check(found: Tensor, wanted: Tensor) -> None:
    near = NEAR[found.dtype]
    assert_close(found.double(), wanted, rtol=near, atol=near)


def squares_of(x: Tensor, parts: int = 3) -> Squares:
    """As a product of several programs leaves them; rows that are none have any number."""
    sums = torch.full((parts, MOST_ROWS), float("nan"), device=DEVICE)
    for part, columns in enumerate(x.float().tensor_split(parts, dim=1)):
        sums[part, : len(x)] = columns.square().sum(1)
    return Squares(sums=sums)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", ["same", "float32"])
@pytest.mark.parametrize("rows, outputs, inputs", [(1, 16, 16), (3, 75, 300), (8, 130, 512)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_rows_are_multiplied(
    rows: int, outputs: int, inputs: int, has_bias: bool, out_dtype: str, dtype: torch.dtype
) -> None:
    """Oracle: float64."""
    x, weight = random(rows, inputs).to(dtype), (random(outputs, inputs, seed=1) / inputs**0.5).to(dtype)
    bias = random(outputs, seed=2).to(dtype) if has_bias else None
    out = torch.empty(rows, outputs, dtype=dtype if out_dtype == "same" else torch.float32, device=DEVICE)
    assert PRODUCT(x, weight, bias, out) is None
    wanted = x.double() @ weight.double().t()
    check(out, wanted if bias is None else wanted + bias.double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_is_added_and_the_squares_of_the_sums_are_left_for_the_next_norm(dtype: torch.dtype) -> None:
    x, weight = random(3, 64).to(dtype), (random(100, 64, seed=1) / 8).to(dtype)
    hidden = random(3, 120, seed=2).to(dtype)[:, 4:104]
    wanted = x.double() @ weight.double().t() + hidden.double()
    squares = PRODUCT(x, weight, None, hidden, residual=hidden, squares=True)
    check(hidden, wanted)
    assert squares is not None
    assert_close(squares.sums[:, :3].sum(0), hidden.float().square().sum(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [80, 300])
def test_rows_are_normalised_as_they_are_loaded(inputs: int, dtype: torch.dtype) -> None:
    """Oracle: the kernel that normalises, then the product of what it stores: the same bits."""
    x, weight = 4 * random(3, inputs).to(dtype), random(40, inputs, seed=1).to(dtype)
    scale = (1 + random(inputs, seed=2)).to(dtype)
    found, wanted = (torch.empty(3, 40, dtype=torch.float32, device=DEVICE) for _ in range(2))
    PRODUCT(x, weight, None, found, norm=RowNorm(weight=scale, eps=EPS, squares=squares_of(x, parts=1)))
    PRODUCT(rms_norm(x, scale, EPS, torch.empty_like(x)), weight, None, wanted)
    assert_close(found, wanted, rtol=NEAR[dtype] / 8, atol=NEAR[dtype] / 8)
    normed = x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * scale.double()
    exact = normed @ weight.double().t()
    assert (found.double() - exact).norm() < NEAR[dtype] * exact.norm()
    PRODUCT(x, weight, None, wanted, norm=RowNorm(weight=scale, eps=EPS, squares=squares_of(x)))
    assert_close(found, wanted, rtol=NEAR[dtype] / 8, atol=NEAR[dtype] / 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_gate_and_up_are_one_product(has_bias: bool, dtype: torch.dtype) -> None:
    x, weight = random(5, 300).to(dtype), (random(2 * 70, 300, seed=1) / 17).to(dtype)
    bias = random(140, seed=2).to(dtype) if has_bias else None
    out = torch.empty(5, 70, dtype=dtype, device=DEVICE)
    PRODUCT(x, weight, bias, out, gate=True)
    gate_up = x.double() @ weight.double().t()
    gate, up = (gate_up if bias is None else gate_up + bias.double()).to(dtype).double().chunk(2, dim=1)
    near = 3 * NEAR[dtype] / 2  # three roundings, which the interpreter cuts off
    assert_close(out.double(), functional.silu(gate) * up, rtol=near, atol=near)


def test_a_row_has_the_same_bits_whatever_other_rows_there_are() -> None:
    x, weight = random(8, 300).half(), random(64, 300, seed=1).half()
    norm = random(300, seed=2).half()
    together, alone = torch.empty(8, 64, device=DEVICE), torch.empty(1, 64, device=DEVICE)
    PRODUCT(x, weight, None, together, norm=RowNorm(weight=norm, eps=EPS, squares=squares_of(x)))
    for row in range(8):
        one = x[row : row + 1]
        PRODUCT(one, weight, None, alone, norm=RowNorm(weight=norm, eps=EPS, squares=squares_of(one)))
        assert torch.equal(alone[0], together[row])


def test_rows_may_lie_apart_and_nothing_else_is_written() -> None:
    whole, target = random(4, 96).half(), torch.zeros(6, 60, dtype=torch.float16, device=DEVICE)
    x, weight = whole[:, 16:80], random(40, 64, seed=1).half()
    PRODUCT(x, weight, None, target[1:5, 8:48])
    check(target[1:5, 8:48], x.double() @ weight.double().t())
    target[1:5, 8:48] = 0
    assert not target.any()


def test_programs_are_as_many_as_processors_where_outputs_allow() -> None:
    for processors, outputs, block in ((132, 28672, 32), (132, 4096, 16), (132, 6144, 32), (132, 1024, 16)):
        assert FewRowsProduct(processors)._block(outputs) == block


def test_what_does_not_fit_is_refused_by_name() -> None:
    x, weight, out = random(2, 16).half(), random(6, 16).half(), random(2, 6).half()
    with pytest.raises(EngineError, match="9 rows; the kernel takes at most 8"):
        PRODUCT(random(9, 16).half(), weight, None, out)
    with pytest.raises(EngineError, match=r"weight is torch\.float32"):
        PRODUCT(x, weight.float(), None, out)
    with pytest.raises(EngineError, match="out has shape"):
        PRODUCT(x, weight, None, out, gate=True)
    with pytest.raises(EngineError, match="a gate has no residual"):
        PRODUCT(x, weight, None, out[:, :3], gate=True, residual=out[:, :3])
