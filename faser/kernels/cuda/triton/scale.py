"""Finishes a product of quantised matrices in one launch: scales the sums, adds bias and residual.

interface/fp8.py defines it. All arithmetic is in float32; the result is rounded once.
"""

import torch
import triton.language as tl
from torch import Tensor

from faser.kernels.cuda.triton.common.tensors import EXACT, expect, expect_lines, jit

_BLOCK = 1024
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@jit
def scaled_sums(
    sums, row_scales, column_scales, addend, row, column, inside, width, ADDS: tl.constexpr
):  # fmt: skip
    """float32, the product of these columns of a row: the sum, both scales, the bias."""
    value = tl.load(sums + row * width + column, mask=inside, other=0.0)
    value = value * tl.load(row_scales + row) * tl.load(column_scales + column, mask=inside, other=0.0)
    if ADDS:
        value += tl.load(addend + column, mask=inside, other=0.0).to(tl.float32)
    return value


@jit
def _scale(
    sums, row_scales, column_scales, addend, residual, residual_stride, scaled, out_stride, width,
    ADDS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some columns of one row. Reads each element before it writes it, so residual may be the output."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = scaled_sums(sums, row_scales, column_scales, addend, row, column, inside, width, ADDS)
    if HAS_RESIDUAL:
        value += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(scaled + row * out_stride + column, value.to(scaled.dtype.element_ty), mask=inside)


def scale_sums(
    sums: Tensor,
    row_scales: Tensor,
    column_scales: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
) -> Tensor:
    """out[r, n] = sums[r, n] * row_scales[r] * column_scales[n] + bias[n] + residual[r, n]. Returns out.

    sums: [R, N] float32. row_scales: [R], column_scales: [N], float32. bias: [N], any dtype that out may have.
    out: [R, N] float32, bfloat16 or float16, each row contiguous. residual: [R, N] of out's dtype, may be out.

    Raises EngineError that names the tensor that does not fit.
    """
    rows, width = sums.shape
    expect("sums", sums, (rows, width), torch.float32, like=sums)
    expect("row_scales", row_scales, (rows,), torch.float32, like=sums)
    expect("column_scales", column_scales, (width,), torch.float32, like=sums)
    expect_lines("out", out, (rows, width), *_TYPES, like=sums)
    if bias is not None:
        expect("bias", bias, (width,), *_TYPES, like=sums)
    if residual is not None:
        expect_lines("residual", residual, (rows, width), out.dtype, like=sums)
    if rows:
        _scale[(rows, -(-width // _BLOCK))](
            sums, row_scales, column_scales, sums if bias is None else bias,
            sums if residual is None else residual, 0 if residual is None else residual.stride(0),
            out, out.stride(0), width, ADDS=bias is not None, HAS_RESIDUAL=residual is not None, BLOCK=_BLOCK,
            **EXACT,
        )  # fmt: skip
    return out
