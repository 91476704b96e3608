"""Products of at most MOST_ROWS rows, each with what stands before and behind it, in one launch.

    out = activation(gate) * up  or  product (+ bias) (+ residual)      product: of the rows, or of their RMS norm

Few rows are bound by reading the weights. A warp has some outputs and reads them in order, _LANES vectors of 16
bytes at a time, several steps ahead; the rows, which all programs read again, come from the L2 cache. Products are
multiplied and added on CUDA cores in float32, and nothing is rounded before the end. A row's norm needs its sum of
squares only at the end too, since it scales all sums of the row alike, so weights never wait for it.

Weights in 8 bits are widened in registers. Scales of outputs multiply their sums, scales of groups of columns each
weight. The rows are not rounded to 8 bits, as they are for tensor cores: results are those of the weights that the
codes stand for.

The order of a row's sums follows from the width alone, so its bits do not depend on the other rows, on their
number, or on how many outputs a program has.

With `dependent`, the launch before this one may still be running when the programs start: they ask for their first
weights, then wait for it. Weights never change, everything else is read and written after the wait.
"""

import torch
import triton.language as tl
from torch import Tensor

from faser.kernels.cuda.triton.common import (
    ACTIVATIONS,
    EXACT,
    activated,
    expect,
    expect_lines,
    jit,
    next_power_of_2,
)
from faser.kernels.interface.fp8 import FP8

MOST_ROWS = 8
# Outputs of a program, and how many steps ahead their weights are read: 32 to 64 KiB.
STAGES = {8: 8, 16: 6, 32: 4}
_WARPS = 4
_LANES = tl.constexpr(32)
_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_SECTOR_BYTES = tl.constexpr(64)  # that memory reads at once


@jit
def ask_for(places):
    """Begin to bring what is at these addresses into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
    )


@jit
def wait_for_launch_before():
    """Wait until the launch before has ended, and all that it wrote is visible; let the next one start."""
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()


@jit
def nothing():
    """Return an empty tuple, whose type the type checker does not take for that of all later ones."""
    return ()


@jit
def _halves(tile, OUTPUTS: tl.constexpr, HALVES: tl.constexpr):
    """Split [OUTPUTS, 8 HALVES _LANES] into HALVES of 8 values of each lane, which lie together; nothing moves."""
    if HALVES == 2:
        found = tl.split(tl.permute(tl.reshape(tile, [OUTPUTS, _LANES, 2, 8]), (0, 1, 3, 2)))
    else:
        found = (tile,)
    return found


@jit
def _eighths(values, OUTPUTS: tl.constexpr):
    """Split OUTPUTS lines of 8 _LANES into 8 of [OUTPUTS, _LANES], each lane's first, second … value, float32."""
    even, odd = tl.split(tl.reshape(values.to(tl.float32), [OUTPUTS, _LANES, 2, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return tl.split(first) + tl.split(second) + tl.split(third) + tl.split(fourth)


@jit
def _times(values, factor):
    """Multiply each of eight values of a lane by its factor."""
    found = nothing()
    for each in tl.static_range(8):
        found += (values[each] * factor,)
    return found


@jit
def _added(sums, weights, row, OUTPUTS: tl.constexpr):
    """sums + weights * row, of each lane. weights, row: from _eighths."""
    for each in tl.static_range(8):
        sums = tl.fma(weights[each], tl.broadcast_to(row[each], (OUTPUTS, _LANES)), sums)
    return sums


@jit
def _few_rows(
    x, stride, weight, scales, groups, norm, bias, residual, residual_stride, out, out_stride, num_rows, size,
    width, eps, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STAGES: tl.constexpr, NORMED: tl.constexpr,
    SCALED: tl.constexpr, GROUP: tl.constexpr, LINES: tl.constexpr, BIASED: tl.constexpr, ADDS: tl.constexpr,
    ACTIVATION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """OUTPUTS outputs of all rows; with ACTIVATION OUTPUTS / 2 of `gate` and as many of `up`.

    size: outputs without counting `up`. GROUP: columns that share a scale, of LINES outputs; 0: all do. ROWS:
    num_rows or more; the last row is computed again.
    """
    HALVES: tl.constexpr = 2 if SCALED else 1  # a lane reads 16 bytes, and computes with 8 values at a time
    STEP: tl.constexpr = 8 * HALVES * _LANES
    PAIRED: tl.constexpr = ACTIVATION != ""
    NUM: tl.constexpr = OUTPUTS // 2 if PAIRED else OUTPUTS
    output = tl.program_id(0) * NUM + tl.arange(0, NUM)
    line = tl.minimum(output, size - 1).to(tl.int64)
    column = tl.arange(0, STEP)
    place = weight + line[:, None] * width + column[None, :]
    up_place = place + size.to(tl.int64) * width
    if DEPENDENT:
        SECTOR: tl.constexpr = _SECTOR_BYTES * 8 // weight.dtype.element_ty.primitive_bitwidth
        first = weight + line[:, None] * width + (tl.arange(0, STEP // SECTOR) * SECTOR)[None, :]
        for step in tl.static_range(STAGES):
            if (step + 1) * STEP <= width:
                ask_for(first + step * STEP)
                if PAIRED:
                    ask_for(first + size.to(tl.int64) * width + step * STEP)
        wait_for_launch_before()
    sums, up_sums, squares = nothing(), nothing(), nothing()
    for _ in tl.static_range(ROWS):
        sums += (tl.zeros((NUM, _LANES), tl.float32),)
        if PAIRED:
            up_sums += (tl.zeros((NUM, _LANES), tl.float32),)
        if NORMED:
            squares += (tl.zeros((1, _LANES), tl.float32),)
    value = tl.arange(0, 8 * _LANES)
    if GROUP:
        lane_at = 8 * HALVES * tl.arange(0, _LANES)
        scale_at = scales + line // LINES * groups
        up_scale_at = scales + (size + line) // LINES * groups
    for start in tl.range(0, width, STEP, num_stages=STAGES):
        inside = start + column < width
        tiles = _halves(tl.load(place + start, mask=inside[None, :], other=0.0), NUM, HALVES)
        if PAIRED:
            up_tiles = _halves(tl.load(up_place + start, mask=inside[None, :], other=0.0), NUM, HALVES)
        if GROUP:
            known = (start + lane_at < width)[None, :]
            place_of = ((start + lane_at) // GROUP)[None, :]
            factor = tl.load(scale_at[:, None] + place_of, mask=known, other=0.0)
            if PAIRED:
                up_factor = tl.load(up_scale_at[:, None] + place_of, mask=known, other=0.0)
        for half in tl.static_range(HALVES):
            at = start + (value if HALVES == 1 else value // 8 * 16 + half * 8 + value % 8)
            inside = at < width
            weights = _eighths(tiles[half], NUM)
            if GROUP:
                weights = _times(weights, factor)
            if PAIRED:
                up_weights = _eighths(up_tiles[half], NUM)
                if GROUP:
                    up_weights = _times(up_weights, up_factor)
            if NORMED:
                factors = _eighths(tl.load(norm + at, mask=inside, other=0.0), 1)
            next_sums, next_up_sums, next_squares = nothing(), nothing(), nothing()
            for number in tl.static_range(ROWS):
                source = x + tl.minimum(number, num_rows - 1).to(tl.int64) * stride + at
                row = _eighths(tl.load(source, mask=inside, other=0.0), 1)
                if NORMED:
                    next_squares += (_added(squares[number], row, row, 1),)
                    scaled = nothing()
                    for each in tl.static_range(8):
                        scaled += (row[each] * factors[each],)
                    row = scaled
                next_sums += (_added(sums[number], weights, row, NUM),)
                if PAIRED:
                    next_up_sums += (_added(up_sums[number], up_weights, row, NUM),)
            sums, up_sums, squares = next_sums, next_up_sums, next_squares
    stored = output < size
    for number in tl.static_range(ROWS):
        found = tl.sum(sums[number], 1)
        if NORMED:
            factor = 1.0 / tl.sqrt(tl.sum(squares[number]) / width + eps)
            found *= factor
        if SCALED and GROUP == 0:
            found *= tl.load(scales + line)
        if BIASED:
            found += tl.load(bias + line).to(tl.float32)
        if PAIRED:
            up = tl.sum(up_sums[number], 1)
            if NORMED:
                up *= factor
            if SCALED and GROUP == 0:
                up *= tl.load(scales + size + line)
            if BIASED:
                up += tl.load(bias + size + line).to(tl.float32)
            found = activated(found, up, ACTIVATION)
        kept = stored & (number < num_rows)
        if ADDS:
            found += tl.load(residual + number * residual_stride + line, mask=kept, other=0.0).to(tl.float32)
        tl.store(out + number * out_stride + line, found.to(out.dtype.element_ty), mask=kept)


def few_rows(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    scales: Tensor | None = None,
    group: int | None = None,
    lines: int = 1,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "",
    outputs: int = 16,
) -> Tensor:
    """out = (rms_norm(x) or x) @ weight.T (* scales) (+ bias), gated if there is an activation (+ residual).

    x: [R, K], 1 to MOST_ROWS rows. weight: [N, K] of the type of x, or float8_e4m3fn with scales [N] float32,
    or of a group of columns, a multiple of 16, scales [ceil(N / lines), ceil(K / group)].
    norm: [K]. bias: [N]. activation: one of ACTIVATIONS; then weight has gate and up, and out N / 2 columns.
    out: [R, N] of any type, each row contiguous; it may be the residual. outputs: of a program, a key of STAGES.
    Returns out. Raises EngineError that names the tensor that does not fit.
    """
    rows, width = x.shape
    size = len(weight) // 2 if activation else len(weight)
    assert 0 < rows <= MOST_ROWS, rows
    assert not activation or activation in ACTIVATIONS, activation
    expect_lines("x", x, (rows, width), *_TYPES, like=x)
    expect("weight", weight, (len(weight), width), x.dtype if scales is None else FP8, like=x)
    if scales is not None:
        wanted = (len(weight),) if group is None else (-(-len(weight) // lines), -(-width // group))
        expect("scales", scales, wanted, torch.float32, like=x)
    expect_lines("out", out, (rows, size), *_TYPES, like=x)
    if residual is not None:
        expect_lines("residual", residual, (rows, size), out.dtype, like=x)
    for name, each, length in (
        ("norm", norm, width),
        ("bias", bias, len(weight)),
    ):
        if each is not None:
            expect(name, each, (length,), *_TYPES, like=x)
    added = out if residual is None else residual
    _few_rows[(-(-size // (outputs // 2 if activation else outputs)),)](
        x, x.stride(0), weight, x if scales is None else scales, 0 if group is None else -(-width // group),
        x if norm is None else norm, x if bias is None else bias, added, added.stride(0), out, out.stride(0), rows,
        size, width, eps, ROWS=next_power_of_2(rows), OUTPUTS=outputs, STAGES=STAGES[outputs],
        NORMED=norm is not None, SCALED=scales is not None, GROUP=group or 0, LINES=lines, BIASED=bias is not None,
        ADDS=residual is not None, ACTIVATION=activation, DEPENDENT=x.is_cuda, num_warps=_WARPS, **dependent(x),
        **EXACT,
    )  # fmt: skip
    return out


def dependent(x: Tensor) -> dict[str, bool]:
    """Option of a launch that may start before the one before it has ended."""
    return {"launch_pdl": True} if x.is_cuda else {}
