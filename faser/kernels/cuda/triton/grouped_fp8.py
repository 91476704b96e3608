"""Products with weights in 8-bit floats that have a scale for each group of columns, of rows in 16 bits.

    out = x @ (weight * scales).T (+ bias) (+ residual)

Weights are widened to the type of the rows as they are loaded, exactly, and tensor cores multiply them; the sums
of a group are multiplied by its scale and added up in float32. So nothing is rounded before the end: the product
is that of the weights, where the checkpoint's own arithmetic rounds the rows to 8 bits as well.

A row's sums have one order, whatever the other rows are, but for what a larger block of rows may do to a product
of the tensor cores.
"""

import math
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from faser.kernels.cuda.triton.common import EXACT, expect, expect_lines, jit, jit_for_any
from faser.kernels.interface.fp8 import FP8, Fp8Rows
from faser.optional import or_else

LEAST_GROUP = 16  # columns: what a product of the tensor cores takes at least
WHOLE_ROW = 1 << 30  # columns of a group, for weights with one scale a row
_TYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedTiles:
    """Rows and outputs of a program, the columns of a step at most, warps, and steps that are on their way."""

    rows: int
    outputs: int
    depth: int = 128
    warps: int = 4
    stages: int = 3


# By the most rows of a step: ways to compute it, the first of which is taken where nothing can be measured.
TILES = {
    16: (GroupedTiles(rows=16, outputs=64, stages=4), GroupedTiles(rows=16, outputs=32, stages=5)),
    32: (GroupedTiles(rows=32, outputs=64, stages=4), GroupedTiles(rows=32, outputs=128)),
    64: (GroupedTiles(rows=64, outputs=64, stages=4), GroupedTiles(rows=64, outputs=128, warps=8)),
    128: (GroupedTiles(rows=128, outputs=64, depth=64, stages=4), GroupedTiles(rows=128, outputs=128, warps=8)),
}
ALL_TILES = tuple(each for some in TILES.values() for each in some)


def tiles_of(rows: int) -> tuple[GroupedTiles, ...]:
    return TILES[next((most for most in TILES if rows <= most), max(TILES))]


@jit
def scaled_sums(weights, rows, sums, scale, WEIGHTS_FIRST: tl.constexpr, WIDE: tl.constexpr):
    """sums + scale * rows @ weights.T, float32; transposed where weights come first. weights: float8.

    scale: of each output. WIDE: widen the factors first: the interpreter multiplies no 16 bits.
    """
    kind = tl.float32 if WIDE else rows.dtype
    weights, rows = weights.to(kind), rows.to(kind)
    if WEIGHTS_FIRST:
        found = tl.dot(weights, tl.trans(rows), input_precision="ieee") * scale[:, None]
    else:
        found = tl.dot(rows, tl.trans(weights), input_precision="ieee") * scale[None, :]
    return sums + found


@jit_for_any("num_rows")
def _grouped_product(
    x, stride, weight, scales, bias, residual, residual_stride, out, out_stride, num_rows, size, width, groups,
    GROUP: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
    BIASED: tl.constexpr, ADDS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """OUTPUTS outputs of ROWS rows. Programs of the same outputs are neighbours, which share their weights."""
    pieces = tl.cdiv(num_rows, ROWS)
    row = (tl.program_id(0) % pieces * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    output = (tl.program_id(0) // pieces * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    there, inside = row < num_rows, output < size
    weight_at, scale_at = weight + output[:, None] * width, scales + output // LINES * groups
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(0, width, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        among = (depth < width)[None, :]
        rows = tl.load(x + row[:, None] * stride + depth[None, :], mask=there[:, None] & among, other=0.0)
        weights = tl.load(weight_at + depth[None, :], mask=inside[:, None] & among, other=0.0)
        scale = tl.load(scale_at + start // GROUP, mask=inside, other=0.0)
        sums = scaled_sums(weights, rows, sums, scale, True, WIDE)
    found = tl.trans(sums)
    if BIASED:
        found += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)[None, :]
    kept = there[:, None] & inside[None, :]
    if ADDS:
        added = residual + row[:, None] * residual_stride + output[None, :]
        found += tl.load(added, mask=kept, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * out_stride + output[None, :], found.to(out.dtype.element_ty), mask=kept)


def grouped_product(
    x: Tensor,
    weight: Fp8Rows,
    bias: Tensor | None,
    out: Tensor,
    residual: Tensor | None = None,
    *,
    tiles: GroupedTiles | None = None,
) -> Tensor:
    """Compute out [R, N] of x [R, K], each row contiguous, with a packed weight [N, K] and bias [N]. Returns out.

    residual: [R, N] of out's type, added; it may be out. tiles: None: the first ones for this number of rows.
    Raises EngineError that names the tensor that does not fit.
    """
    (rows, width), size = x.shape, len(weight.values)
    group = weight.group or WHOLE_ROW
    groups = -(-width // group)
    expect_lines("x", x, (rows, width), *_TYPES, like=x)
    expect("weight", weight.values, (size, width), FP8, like=x)
    expect("scales", weight.scales.view(-1, groups), (-(-size // weight.lines), groups), torch.float32, like=x)
    expect_lines("out", out, (rows, size), *_TYPES, like=x)
    expect("bias", bias, (size,), *_TYPES, like=x)
    expect_lines("residual", residual, (rows, size), out.dtype, like=x)
    if not rows:
        return out
    chosen, added = tiles or tiles_of(rows)[0], or_else(residual, out)
    _grouped_product[(-(-rows // chosen.rows) * -(-size // chosen.outputs),)](
        x, x.stride(0), weight.values, weight.scales, or_else(bias, x), added, added.stride(0), out, out.stride(0),
        rows, size, width, groups, GROUP=group, LINES=weight.lines, ROWS=chosen.rows, OUTPUTS=chosen.outputs,
        DEPTH=math.gcd(chosen.depth, group), BIASED=bias is not None, ADDS=residual is not None,
        WIDE=x.device.type == "cpu", num_warps=chosen.warps, num_stages=chosen.stages, **EXACT,
    )  # fmt: skip
    return out
