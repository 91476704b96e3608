"""Backend.silu_mul in one launch. All arithmetic is in float32; the result is rounded once."""

import torch
import triton.language as tl
from torch import Tensor

from faser.kernels.cuda.triton.common.elementwise import gated
from faser.kernels.cuda.triton.common.tensors import EXACT, expect_lines, jit

_BLOCK = 1024
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@jit
def _silu_mul(gate_up, stride, gated_rows, out_stride, width, BLOCK: tl.constexpr):
    """Some columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * stride + width + column, mask=inside, other=0.0)
    tl.store(gated_rows + row * out_stride + column, gated(gate, up).to(gate.dtype), mask=inside)


def silu_mul(gate_up: Tensor, out: Tensor) -> Tensor:
    """out = silu(gate) * up. gate_up: [R, 2 F], gate then up; out: [R, F]. One type, each row contiguous.

    Returns out. Raises EngineError that names the tensor that does not fit.
    """
    rows, width = out.shape
    expect_lines("gate_up", gate_up, (rows, 2 * width), *_TYPES, like=out)
    expect_lines("out", out, (rows, width), gate_up.dtype, like=out)
    if rows:
        _silu_mul[(rows, -(-width // _BLOCK))](
            gate_up, gate_up.stride(0), out, out.stride(0), width, BLOCK=_BLOCK, **EXACT
        )
    return out
