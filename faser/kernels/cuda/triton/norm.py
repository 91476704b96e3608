"""Backend.rms_norm in one launch. The norms of single heads are part of rope_append.

A row stays in the registers of one program. As in the torch backend, the normalised number is rounded to the type
of the rows before the weight multiplies it.
"""

import torch
import triton.language as tl
from torch import Tensor

from faser.kernels.cuda.triton.common.elementwise import normalised
from faser.kernels.cuda.triton.common.tensors import EXACT, expect, expect_lines, jit, next_power_of_2, row_warps

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@jit
def _rms_norm(x, stride, weight, scaled, out_stride, width, eps, BLOCK: tl.constexpr):
    """One row, read once."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * stride + column, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    factors = tl.load(weight + column, mask=inside, other=0.0)
    found = normalised(value, tl.sum(wide * wide), width, eps, factors)
    tl.store(scaled + row * out_stride + column, found, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """out[r] = x[r] / sqrt(mean(x[r]²) + eps) * weight. Returns out.

    x, out: [R, D] float32, bfloat16 or float16, one type, each row contiguous; out may be x. weight: [D].
    Raises EngineError that names the tensor that does not fit, and for rows wider than tensors.WIDEST_ROW.
    """
    rows, width = x.shape
    expect_lines("x", x, (rows, width), *_TYPES, like=x)
    expect("weight", weight, (width,), x.dtype, like=x)
    expect_lines("out", out, (rows, width), x.dtype, like=x)
    warps = row_warps(width)
    if rows:
        _rms_norm[(rows,)](
            x, x.stride(0), weight, out, out.stride(0), width, eps, BLOCK=next_power_of_2(width), num_warps=warps,
            **EXACT,
        )  # fmt: skip
    return out
