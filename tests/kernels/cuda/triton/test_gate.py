"""Gated rows against float64: float32 within some units of its last place, 16-bit types within one rounding.

Bugs these tests have been seen to catch: gate and up swapped, the gate's sign, up read from the gate, rows
taken to lie in line, only the first columns of a row; a clamp of one side alone, of the other operand, or none.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from faser.errors import EngineError
from faser.kernels.cuda.triton.layer_ops import gate
from tests.kernels.cuda.triton.rows import DEVICE

NEAR = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def random(*size: int) -> Tensor:
    return 3 * torch.randn(size, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def wanted(gate_up: Tensor, activation: str = "silu") -> Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    if activation == "swigluoai":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")) * up


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swigluoai"])
@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("rows, width", [(1, 8), (3, 1100)])
def test_rows_are_gated(rows: int, width: int, dtype: torch.dtype, activation: str) -> None:
    gate_up = random(rows, 2 * width).to(dtype)
    out = torch.empty(rows, width, dtype=dtype, device=DEVICE)
    assert gate(gate_up, out, activation) is out
    assert_close(out.double(), wanted(gate_up, activation), rtol=NEAR[dtype], atol=1e-7)


def test_large_gates_are_no_trouble() -> None:
    gate_up = torch.tensor([[1e4, -1e4, -90.0, 0.0, 2.0, 2.0, 2.0, 2.0]], device=DEVICE)
    found = gate(gate_up, torch.empty(1, 4, device=DEVICE))
    assert found.tolist() == [[2e4, 0.0, 0.0, 0.0]]


def test_rows_may_lie_apart() -> None:
    whole, target = random(3, 50), torch.zeros(3, 30, device=DEVICE)
    gate_up = whole[:, 5:45]
    gate(gate_up, target[:, 4:24])
    assert_close(target[:, 4:24].double(), wanted(gate_up), rtol=1e-6, atol=1e-7)
    assert not target[:, :4].any()
    assert not target[:, 24:].any()


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(EngineError, match="gate_up has shape"):
        gate(torch.zeros(2, 9, device=DEVICE), torch.zeros(2, 5, device=DEVICE))
    with pytest.raises(EngineError, match=r"out is torch\.float16"):
        gate(torch.zeros(2, 10, device=DEVICE), torch.zeros(2, 5, dtype=torch.float16, device=DEVICE))
