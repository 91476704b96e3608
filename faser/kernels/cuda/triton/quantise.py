"""Quantises rows to 8-bit floats in one launch: each row's largest magnitude, scale and values.

Gives the bits of interface/fp8.quantise_rows, which is the definition.
"""

import torch
import triton.language as tl
from torch import Tensor

from faser.kernels.cuda.triton.common.float8 import code
from faser.kernels.cuda.triton.common.tensors import EXACT, expect, expect_lines, jit, next_power_of_2, row_warps
from faser.kernels.interface.fp8 import FP8, FP8_MAX, LEAST_LARGEST

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_LIMIT = tl.constexpr(FP8_MAX)
_LEAST = tl.constexpr(LEAST_LARGEST)


@jit
def quantised(value):
    """Codes and scale of a row, float32; elements outside of it are 0."""
    largest = tl.maximum(tl.max(tl.abs(value)), _LEAST)
    limit = tl.full(largest.shape, _LIMIT, tl.float32)
    return code(value * tl.div_rn(limit, largest)).to(tl.uint8), tl.div_rn(largest, limit)


@jit
def _quantise(x, stride, codes, scales, width, BLOCK: tl.constexpr):
    """One row, read once."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    bits, scale = quantised(value)
    tl.store(scales + row, scale)
    tl.store(codes + row * width + column, bits, mask=inside)


def quantise_rows(x: Tensor, values: Tensor, scales: Tensor) -> None:
    """Write values [R, K] float8_e4m3fn and scales [R] float32, as interface/fp8.Fp8Rows has them.

    x: [R, K] float32, bfloat16 or float16, each row contiguous. A row with an infinity or a NaN gets a NaN value.
    Raises EngineError that names the tensor that does not fit, and for rows wider than
    tensors.WIDEST_ROW.
    """
    rows, width = x.shape
    warps = row_warps(width)
    expect_lines("x", x, (rows, width), *_TYPES, like=x)
    expect("values", values, (rows, width), FP8, like=x)
    expect("scales", scales, (rows,), torch.float32, like=x)
    if rows:
        _quantise[(rows,)](
            x, x.stride(0), values.view(torch.uint8), scales, width, BLOCK=next_power_of_2(width),
            num_warps=warps, **EXACT,
        )  # fmt: skip
