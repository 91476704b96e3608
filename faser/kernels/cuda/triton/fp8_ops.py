"""Operations around products of 8-bit floats, in one launch each; interface/fp8.py is the definition.

    quantise_rows   each row's largest magnitude, scale and values
    scale_sums      scales the sums of a product, adds bias and residual
    add_norm        hidden += product; the RMS norm of hidden, quantised        sums and bias are optional
    gate            gate and up are the product; silu(gate) * up, quantised

The last two stand between two products, and give the same numbers as the single operations one after the other:
rounded where these store them. On a GPU the squares of a row may be added up in another order. A row stays in the
registers of one program; all arithmetic is in float32.
"""

import torch
import triton.language as tl
from torch import Tensor

from faser.kernels.cuda.triton.common import (
    EXACT,
    code,
    expect,
    expect_lines,
    gated,
    jit,
    next_power_of_2,
    normalised,
    row_warps,
)
from faser.kernels.interface.fp8 import FP8, FP8_MAX, LEAST_LARGEST, UnscaledProduct
from faser.optional import or_else

_BLOCK = 1024
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
    Raises EngineError that names the tensor that does not fit, and for rows wider than common.WIDEST_ROW.
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
    expect("bias", bias, (width,), *_TYPES, like=sums)
    expect_lines("residual", residual, (rows, width), out.dtype, like=sums)
    added = or_else(residual, out)
    if rows:
        _scale[(rows, -(-width // _BLOCK))](
            sums, row_scales, column_scales, or_else(bias, sums), added, added.stride(0),
            out, out.stride(0), width, ADDS=bias is not None, HAS_RESIDUAL=residual is not None, BLOCK=_BLOCK,
            **EXACT,
        )  # fmt: skip
    return out


@jit
def _add_norm(
    sums, row_scales, column_scales, addend, hidden, stride, weight, codes, scales, width, eps,
    HAS_SUMS: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = hidden + row * stride + column
    value = tl.load(place, mask=inside, other=0.0)
    if HAS_SUMS:
        product = scaled_sums(sums, row_scales, column_scales, addend, row, column, inside, width, ADDS)
        value = (product + value.to(tl.float32)).to(value.dtype)
        tl.store(place, value, mask=inside)
    wide = value.to(tl.float32)
    factors = tl.load(weight + column, mask=inside, other=0.0)
    normed = normalised(value, tl.sum(wide * wide), width, eps, factors)
    bits, scale = quantised(normed.to(tl.float32))
    tl.store(scales + row, scale)
    tl.store(codes + row * width + column, bits, mask=inside)


@jit
def _gate(
    sums, row_scales, column_scales, addend, kind, codes, scales, width, ADDS: tl.constexpr, BLOCK: tl.constexpr
):
    """kind: any tensor of the type that the product is rounded to."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    gate = scaled_sums(sums, row_scales, column_scales, addend, row, column, inside, 2 * width, ADDS)
    up = scaled_sums(sums, row_scales, column_scales, addend, row, column + width, inside, 2 * width, ADDS)
    rounded = gated(gate.to(kind.dtype.element_ty), up.to(kind.dtype.element_ty)).to(kind.dtype.element_ty)
    bits, scale = quantised(tl.where(inside, rounded.to(tl.float32), 0.0))
    tl.store(scales + row, scale)
    tl.store(codes + row * width + column, bits, mask=inside)


def add_norm(
    product: UnscaledProduct | None, hidden: Tensor, weight: Tensor, eps: float, values: Tensor, scales: Tensor
) -> None:
    """hidden [R, D] += product, if there is one; values and scales: of its RMS norm, as quantise_rows writes them.

    hidden: float32, bfloat16 or float16, each row contiguous. weight: [D] float32, or of that type. values:
    [R, D] float8_e4m3fn. scales: [R] float32. Raises EngineError that names the tensor that does not fit.
    """
    rows, width = hidden.shape
    expect_lines("hidden", hidden, (rows, width), *_TYPES, like=hidden)
    expect("weight", weight, (width,), torch.float32, hidden.dtype, like=hidden)
    expect("values", values, (rows, width), FP8, like=hidden)
    expect("scales", scales, (rows,), torch.float32, like=hidden)
    warps = row_warps(width)
    given = (hidden,) * 4  # never read
    if product is not None:
        _check(product, rows, width, hidden)
        bias = or_else(product.bias, product.sums)
        given = (product.sums, product.row_scales, product.column_scales, bias)
    if rows:
        _add_norm[(rows,)](
            *given, hidden, hidden.stride(0), weight, values.view(torch.uint8), scales, width, eps,
            HAS_SUMS=product is not None, ADDS=product is not None and product.bias is not None,
            BLOCK=next_power_of_2(width), num_warps=warps, **EXACT,
        )  # fmt: skip


def gate(product: UnscaledProduct, dtype: torch.dtype, values: Tensor, scales: Tensor) -> None:
    """values [R, F] float8_e4m3fn and scales [R]: of silu(gate) * up, with gate and up the product's halves.

    dtype: the type of activations, to which the product is rounded. Raises EngineError that names the tensor that
    does not fit.
    """
    rows, width = values.shape
    _check(product, rows, 2 * width, values)
    expect("values", values, (rows, width), FP8, like=values)
    expect("scales", scales, (rows,), torch.float32, like=values)
    warps = row_warps(width)
    bias = or_else(product.bias, product.sums)
    if rows:
        _gate[(rows,)](
            product.sums, product.row_scales, product.column_scales, bias,
            torch.empty(0, dtype=dtype, device=values.device), values.view(torch.uint8), scales, width,
            ADDS=product.bias is not None, BLOCK=next_power_of_2(width), num_warps=warps, **EXACT,
        )  # fmt: skip


def _check(product: UnscaledProduct, rows: int, width: int, like: Tensor) -> None:
    expect("sums", product.sums, (rows, width), torch.float32, like=like)
    expect("row_scales", product.row_scales, (rows,), torch.float32, like=like)
    expect("column_scales", product.column_scales, (width,), torch.float32, like=like)
    expect("bias", product.bias, (width,), *_TYPES, like=like)
