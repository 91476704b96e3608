"""Products with low-bit weights as they are stored (kernels/cuda/low_bit.py), and their dequantising.

    few_low_bit_rows    at most MOST_FEW rows, with norm, gate or residual in one launch, on CUDA cores in float32
    low_bit_rows        any number of rows, on tensor cores: weights are rounded to the type of the rows
    dequantise          lines of a weight in 16 bits, for products of many rows by cuBLAS

The first reads weights as few_rows.py does: a lane takes 16 bytes at a time, which lie in one group, and adds up
codes times values before the group's scale multiplies them. Bits of a code stay where they are in their word; the
power of two that this multiplies them by is taken from the values of the row. Zero points and minimums need only
the sum of the row's values.

In all three the bits of a row do not depend on the other rows, and in the first two not on their number.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from faser.kernels.cuda.low_bit import GROUPS, Factors, LowBitMatrix
from faser.kernels.cuda.triton.common import (
    ACTIVATIONS,
    EXACT,
    activated,
    expect,
    expect_lines,
    jit,
    jit_for_any,
    next_power_of_2,
)
from faser.kernels.cuda.triton.few_rows import (
    _eighths,
    ask_for,
    dependent,
    nothing,
    wait_for_launch_before,
)

MOST_FEW = 4  # rows; with more, or with 32 outputs a program, registers do not suffice
STAGES = {8: 6, 16: 4}  # by outputs of a program
MOST_TOGETHER = 64  # rows of one program on tensor cores
_WARPS = 4
_LANES = tl.constexpr(32)
_WORDS = tl.constexpr(4)  # that a lane reads at a time
_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_SMALLEST_POWER = tl.constexpr(0x00400000)  # bits of 2 ** -127, which the exponent 0 names
_FLOAT4_FACTOR = tl.constexpr(32768.0)  # between a float of four bits in a half float's bits, and twice its value


@jit
def _quarters(values, LINES: tl.constexpr):
    """Split LINES lines of 4 _LANES into 4 of [LINES, _LANES], each lane's first, third, second, fourth value."""
    even, odd = tl.split(tl.reshape(values, [LINES, _LANES, 2, 2]))
    return tl.split(even) + tl.split(odd)


@jit
def _float4(nibbles):
    """Return floats of four bits by their bits, float32, times 2**-15 of twice their value."""
    bits = ((nibbles & 8) << 12) | ((nibbles & 7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def _factor(values, halves, line, group, mask, groups, PER_HALF: tl.constexpr, HALVED: tl.constexpr):
    """Return scales or minimums of these groups of these lines, float32. Bytes are exponents; see Factors."""
    found = tl.load(values + line * groups + group, mask=mask, other=0)
    if values.dtype.element_ty == tl.uint8:
        bits = found.to(tl.int32) << 23
        found = tl.where(bits == 0, _SMALLEST_POWER, bits).to(tl.float32, bitcast=True) * 0.5
    else:
        found = found.to(tl.float32)
    if HALVED:
        found *= tl.load(halves + line * (groups // PER_HALF) + group // PER_HALF, mask=mask, other=0).to(
            tl.float32
        )
    return found


@jit
def _codes_of(words, number: tl.constexpr, FORM: tl.constexpr):
    """Return the number-th code of each word, float32: where it lies in the word, or of a float its value."""
    if FORM == "floats":
        found = _float4((words >> (4 * number)).to(tl.int32) & 15)
    elif FORM == "nibbles":
        found = (words & (15 << (4 * number))).to(tl.float32)
    else:
        found = (words & (255 << (8 * number))).to(tl.float32)
    return found


@jit
def _dotted(words, row, sums, LINES: tl.constexpr, FORM: tl.constexpr):
    """sums + codes * row, of each lane. words: [LINES, _LANES]. row: parts of its values, see _row_parts."""
    NUM: tl.constexpr = 4 if FORM == "bytes" else 8
    for at in tl.static_range(NUM):
        codes = _codes_of(words, at // 2 + NUM // 2 * (at % 2), FORM)
        sums = tl.fma(codes, tl.broadcast_to(row[at], (LINES, _LANES)), sums)
    return sums


@jit
def _in_place(row, FORM: tl.constexpr):
    """Divide the parts of a row by what the places of codes in their words multiply these by."""
    if FORM == "floats":
        found = row
    else:
        NUM: tl.constexpr = 4 if FORM == "bytes" else 8
        found = nothing()
        for at in tl.static_range(NUM):
            found += (row[at] * (1.0 / (1 << (32 // NUM * (at // 2 + NUM // 2 * (at % 2))))),)
    return found


@jit
def _few_low_bit_rows(
    x, stride, codes, scales, scale_halves, minimums, minimum_halves, norm, bias, residual, residual_stride, out,
    out_stride, num_rows, size, width, groups, eps,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STAGES: tl.constexpr, FORM: tl.constexpr, ZERO: tl.constexpr,
    GROUP: tl.constexpr, SCALES_HALVED: tl.constexpr, SCALES_PER_HALF: tl.constexpr, LOWERED: tl.constexpr,
    MINIMUMS_HALVED: tl.constexpr, MINIMUMS_PER_HALF: tl.constexpr, NORMED: tl.constexpr, BIASED: tl.constexpr,
    ADDS: tl.constexpr, ACTIVATION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Do what _few_rows of few_rows.py does. codes: words of 32 bits; groups: of a line."""
    PER_WORD: tl.constexpr = 4 if FORM == "bytes" else 8
    VALUES: tl.constexpr = _WORDS * PER_WORD  # of a lane and a step
    STEP: tl.constexpr = VALUES * _LANES
    PAIRED: tl.constexpr = ACTIVATION != ""
    NUM: tl.constexpr = OUTPUTS // 2 if PAIRED else OUTPUTS
    output = tl.program_id(0) * NUM + tl.arange(0, NUM)
    line = tl.minimum(output, size - 1).to(tl.int64)
    line_words = tl.multiple_of(width // PER_WORD, _WORDS)  # as a width is a multiple of 32
    word = tl.arange(0, _WORDS * _LANES)
    if DEPENDENT:
        for step in tl.static_range(STAGES):
            if (step + 1) * STEP <= width:
                sector = step * STEP // PER_WORD + tl.arange(0, _WORDS * _LANES // 16) * 16
                ask_for(codes + line[:, None] * line_words + sector[None, :])
                if PAIRED:
                    ask_for(codes + (size + line)[:, None] * line_words + sector[None, :])
        wait_for_launch_before()
    sums, up_sums, squares = nothing(), nothing(), nothing()
    for _ in tl.static_range(ROWS):
        sums += (tl.zeros((NUM, _LANES), tl.float32),)
        if PAIRED:
            up_sums += (tl.zeros((NUM, _LANES), tl.float32),)
        if NORMED:
            squares += (tl.zeros((1, _LANES), tl.float32),)
    value, lane = tl.arange(0, PER_WORD * _LANES), tl.arange(0, _LANES)
    for start in tl.range(0, width, STEP, num_stages=STAGES):
        at_word = start // PER_WORD + word
        inside = (at_word < line_words)[None, :]
        tile = _quarters(tl.load(codes + line[:, None] * line_words + at_word[None, :], mask=inside, other=0), NUM)
        if PAIRED:
            up_at = (size + line)[:, None] * line_words + at_word[None, :]
            up_tile = _quarters(tl.load(codes + up_at, mask=inside, other=0), NUM)
        first = start + lane * VALUES
        there, group = (first < width)[None, :], (first // GROUP)[None, :]
        scale = _factor(scales, scale_halves, line[:, None], group, there, groups, SCALES_PER_HALF, SCALES_HALVED)
        if PAIRED:
            up_scale = _factor(scales, scale_halves, (size + line)[:, None], group, there, groups, SCALES_PER_HALF,
                               SCALES_HALVED)  # fmt: skip
        if LOWERED:
            minimum = _factor(minimums, minimum_halves, line[:, None], group, there, groups, MINIMUMS_PER_HALF,
                              MINIMUMS_HALVED)  # fmt: skip
            if PAIRED:
                up_minimum = _factor(minimums, minimum_halves, (size + line)[:, None], group, there, groups,
                                     MINIMUMS_PER_HALF, MINIMUMS_HALVED)  # fmt: skip
        next_sums, next_up_sums, next_squares = nothing(), nothing(), nothing()
        for number in tl.static_range(ROWS):
            dots, up_dots = tl.zeros((NUM, _LANES), tl.float32), tl.zeros((NUM, _LANES), tl.float32)
            total, square = tl.zeros((1, _LANES), tl.float32), nothing()
            if NORMED:
                square = squares[number]
            for which in tl.static_range(_WORDS):
                at = start + value // PER_WORD * VALUES + which * PER_WORD + value % PER_WORD
                valid = at < width
                loaded = tl.load(
                    x + tl.minimum(number, num_rows - 1).to(tl.int64) * stride + at, mask=valid, other=0.0
                )
                row = _row_parts(loaded.to(tl.float32), FORM)
                if NORMED:
                    square = _squared(square, row, FORM)
                    row = _times(
                        row, _row_parts(tl.load(norm + at, mask=valid, other=0.0).to(tl.float32), FORM), FORM
                    )
                total = _summed(total, row, FORM)
                placed = _in_place(row, FORM)
                words = _nth(tile, which)
                dots = _dotted(words, placed, dots, NUM, FORM)
                if PAIRED:
                    up_dots = _dotted(_nth(up_tile, which), placed, up_dots, NUM, FORM)
            found = dots - ZERO * total if ZERO != 0 else dots
            found = tl.fma(scale, found, sums[number])
            next_sums += (tl.fma(minimum, tl.broadcast_to(total, (NUM, _LANES)), found) if LOWERED else found,)
            if PAIRED:
                found = up_dots - ZERO * total if ZERO != 0 else up_dots
                found = tl.fma(up_scale, found, up_sums[number])
                next_up_sums += (
                    tl.fma(up_minimum, tl.broadcast_to(total, (NUM, _LANES)), found) if LOWERED else found,
                )
            if NORMED:
                next_squares += (square,)
        sums, up_sums, squares = next_sums, next_up_sums, next_squares
    stored = output < size
    FACTOR: tl.constexpr = _FLOAT4_FACTOR if FORM == "floats" else 1.0
    for number in tl.static_range(ROWS):
        found = tl.sum(sums[number], 1) * FACTOR
        if NORMED:
            factor = 1.0 / tl.sqrt(tl.sum(squares[number]) / width + eps)
            found *= factor
        if BIASED:
            found += tl.load(bias + line).to(tl.float32)
        if PAIRED:
            up = tl.sum(up_sums[number], 1) * FACTOR
            if NORMED:
                up *= factor
            if BIASED:
                up += tl.load(bias + size + line).to(tl.float32)
            found = activated(found, up, ACTIVATION)
        kept = stored & (number < num_rows)
        if ADDS:
            found += tl.load(residual + number * residual_stride + line, mask=kept, other=0.0).to(tl.float32)
        tl.store(out + number * out_stride + line, found.to(out.dtype.element_ty), mask=kept)


@jit
def _nth(tile, which: tl.constexpr):
    """Return the which-th word of each lane. tile: of _quarters, whose order is first, third, second, fourth."""
    return tile[2 * (which % 2) + which // 2]


@jit
def _row_parts(values, FORM: tl.constexpr):
    """Split values of a row [PER_WORD _LANES] into as many of [1, _LANES] as a word has codes."""
    return _quarters(values, 1) if FORM == "bytes" else _eighths(values, 1)


@jit
def _squared(squares, row, FORM: tl.constexpr):
    for at in tl.static_range(4 if FORM == "bytes" else 8):
        squares = tl.fma(row[at], row[at], squares)
    return squares


@jit
def _times(row, factors, FORM: tl.constexpr):
    found = nothing()
    for at in tl.static_range(4 if FORM == "bytes" else 8):
        found += (row[at] * factors[at],)
    return found


@jit
def _summed(total, row, FORM: tl.constexpr):
    for at in tl.static_range(4 if FORM == "bytes" else 8):
        total += row[at]
    return total


@jit
def low_bit_tile(
    codes, scales, scale_halves, minimums, minimum_halves, line, there, start, width, groups,
    FORM: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, SCALES_HALVED: tl.constexpr,
    SCALES_PER_HALF: tl.constexpr, LOWERED: tl.constexpr, MINIMUMS_HALVED: tl.constexpr,
    MINIMUMS_PER_HALF: tl.constexpr, LINES: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Return the weights [LINES, DEPTH] float32 of these lines, int64, from column `start` on; 0 beyond the width.

    there: [LINES] which lines there are. start, DEPTH: multiples of 32; DEPTH is one of GROUP, or a divisor.
    """
    if FORM == "bytes":
        column = start + tl.arange(0, DEPTH)
        mask = there[:, None] & (column < width)[None, :]
        wide = (
            tl.load(codes + line[:, None] * width + column[None, :], mask=mask, other=ZERO).to(tl.float32) - ZERO
        )
    else:
        column = start // 2 + tl.arange(0, DEPTH // 2)
        mask = there[:, None] & (column < width // 2)[None, :]
        pairs = tl.load(codes + line[:, None] * (width // 2) + column[None, :], mask=mask, other=0).to(tl.int32)
        nibbles = tl.interleave(pairs & 15, pairs >> 4)
        wide = _float4(nibbles) * _FLOAT4_FACTOR if FORM == "floats" else nibbles.to(tl.float32) - ZERO
    NUM: tl.constexpr = DEPTH // GROUP if GROUP < DEPTH else 1
    EACH: tl.constexpr = DEPTH // NUM
    group = start // GROUP + tl.arange(0, NUM)
    known = there[:, None] & (group < groups)[None, :]
    scale = _factor(
        scales, scale_halves, line[:, None], group[None, :], known, groups, SCALES_PER_HALF, SCALES_HALVED
    )
    wide = tl.reshape(wide, [LINES, NUM, EACH]) * scale[:, :, None]
    if LOWERED:
        minimum = _factor(
            minimums,
            minimum_halves,
            line[:, None],
            group[None, :],
            known,
            groups,
            MINIMUMS_PER_HALF,
            MINIMUMS_HALVED,
        )
        wide += minimum[:, :, None]
    return tl.reshape(wide, [LINES, DEPTH])


@jit_for_any("num_rows")
def _low_bit_rows(
    x, stride, codes, scales, scale_halves, minimums, minimum_halves, bias, residual, residual_stride, out,
    out_stride, num_rows, size, width, groups,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, FORM: tl.constexpr, ZERO: tl.constexpr,
    GROUP: tl.constexpr, SCALES_HALVED: tl.constexpr, SCALES_PER_HALF: tl.constexpr, LOWERED: tl.constexpr,
    MINIMUMS_HALVED: tl.constexpr, MINIMUMS_PER_HALF: tl.constexpr, BIASED: tl.constexpr, ADDS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """OUTPUTS outputs of ROWS rows. WIDE: factors are widened first, as the interpreter needs it."""
    output, row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there, line, valid = output < size, output.to(tl.int64), row < num_rows
    row_at = x + row.to(tl.int64)[:, None] * stride
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(0, width, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        rows = tl.load(row_at + depth[None, :], mask=valid[:, None] & (depth < width)[None, :], other=0.0)
        weights = low_bit_tile(
            codes, scales, scale_halves, minimums, minimum_halves, line, there, start, width, groups, FORM, ZERO,
            GROUP, SCALES_HALVED, SCALES_PER_HALF, LOWERED, MINIMUMS_HALVED, MINIMUMS_PER_HALF, OUTPUTS, DEPTH,
        ).to(x.dtype.element_ty)  # fmt: skip
        if WIDE:
            weights, rows = weights.to(tl.float32), rows.to(tl.float32)
        sums = tl.dot(weights, tl.trans(rows), sums, input_precision="ieee")
    found = tl.trans(sums)
    if BIASED:
        found += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)[None, :]
    kept = valid[:, None] & there[None, :]
    if ADDS:
        at = residual + row.to(tl.int64)[:, None] * residual_stride + output[None, :]
        found += tl.load(at, mask=kept, other=0.0).to(tl.float32)
    at = out + row.to(tl.int64)[:, None] * out_stride + output[None, :]
    tl.store(at, found.to(out.dtype.element_ty), mask=kept)


@jit_for_any("first", "count")
def _dequantise(
    codes, scales, scale_halves, minimums, minimum_halves, lines, out, first, count, width, groups,
    FORM: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, SCALES_HALVED: tl.constexpr,
    SCALES_PER_HALF: tl.constexpr, LOWERED: tl.constexpr, MINIMUMS_HALVED: tl.constexpr,
    MINIMUMS_PER_HALF: tl.constexpr, LISTED: tl.constexpr, LINES: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """LISTED: lines are those in `lines`; else the ones from `first` on."""
    number, start = tl.program_id(0) * LINES + tl.arange(0, LINES), tl.program_id(1) * DEPTH
    there, column = number < count, start + tl.arange(0, DEPTH)
    line = (first + number).to(tl.int64)
    if LISTED:
        line = tl.load(lines + number, mask=there, other=0)
    found = low_bit_tile(
        codes, scales, scale_halves, minimums, minimum_halves, line, there, start, width, groups, FORM, ZERO,
        GROUP, SCALES_HALVED, SCALES_PER_HALF, LOWERED, MINIMUMS_HALVED, MINIMUMS_PER_HALF, LINES, DEPTH,
    )  # fmt: skip
    at = out + number.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(at, found.to(out.dtype.element_ty), mask=there[:, None] & (column < width)[None, :])


def stages_of(outputs: int, group: int, *, gated: bool) -> int:
    """Return steps that are on their way: one fewer for groups of 16 (Q6_K) with a gate, lest registers spill."""
    return STAGES[outputs] - (gated and group == GROUPS[0])


def few_low_bit_rows(
    x: Tensor,
    weight: LowBitMatrix,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "",
    outputs: int = 16,
) -> Tensor:
    """out = (rms_norm(x) or x) @ weight.T (+ bias), gated if there is an activation (+ residual).

    Arguments, results and errors are those of few_rows (few_rows.py), but for the weight.
    """
    rows, width = x.shape
    lines = weight.num_rows
    size = lines // 2 if activation else lines
    assert 0 < rows <= MOST_FEW, rows
    assert not activation or activation in ACTIVATIONS, activation
    _check(x, weight, out, size, bias, residual)
    expect("norm", norm, (width,), *_TYPES, like=x)
    added = out if residual is None else residual
    _few_low_bit_rows[(-(-size // (outputs // 2 if activation else outputs)),)](
        x, x.stride(0), weight.codes.view(torch.uint32), *factors_of(weight), x if norm is None else norm,
        x if bias is None else bias, added, added.stride(0), out, out.stride(0), rows, size, width,
        weight.scales.values.shape[1], eps,
        ROWS=next_power_of_2(rows), OUTPUTS=outputs,
        STAGES=stages_of(outputs, weight.group, gated=bool(activation)), **kind_of(weight),
        NORMED=norm is not None, BIASED=bias is not None, ADDS=residual is not None, ACTIVATION=activation,
        DEPENDENT=x.is_cuda, num_warps=_WARPS, **dependent(x), **EXACT,
    )  # fmt: skip
    return out


def low_bit_rows(
    x: Tensor, weight: LowBitMatrix, out: Tensor, *, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """out = x @ weight.T (+ bias) (+ residual), on tensor cores, weights rounded to the type of x.

    x: [R, K] bfloat16 or float16. out: [R, N] of any type; both may have gaps between rows. bias: [N]. residual:
    as out, and may be out. Returns out. Raises EngineError that names the tensor that does not fit.
    """
    rows, width = x.shape
    _check(x, weight, out, weight.num_rows, bias, residual)
    if not rows:
        return out
    together = max(16, min(MOST_TOGETHER, next_power_of_2(rows)))
    added = out if residual is None else residual
    _low_bit_rows[(-(-weight.num_rows // 64), -(-rows // together))](
        x, x.stride(0), weight.codes, *factors_of(weight), x if bias is None else bias, added, added.stride(0),
        out, out.stride(0), rows, weight.num_rows, width, weight.scales.values.shape[1],
        ROWS=together, OUTPUTS=64, DEPTH=128, **kind_of(weight), BIASED=bias is not None,
        ADDS=residual is not None, WIDE=not x.is_cuda, num_warps=_WARPS, num_stages=3, **EXACT,
    )  # fmt: skip
    return out


def dequantise(weight: LowBitMatrix, first: int, out: Tensor) -> Tensor:
    """out = the weight's lines from `first` on, in out's type. out: [lines, K], contiguous. Returns out."""
    count = len(out)
    assert first + count <= weight.num_rows, (first, count)
    expect("out", out, (count, weight.width), *_TYPES, like=weight.codes)
    _run_dequantise(weight, out, first=first)
    return out


def lines_of(weight: LowBitMatrix, numbers: Tensor, out: Tensor) -> Tensor:
    """out[r] = the weight's line numbers[r], in out's type. numbers: [R] int64. out: [R, K]. Returns out."""
    expect("out", out, (len(numbers), weight.width), *_TYPES, like=weight.codes)
    expect("numbers", numbers, (len(out),), torch.int64, like=out)
    if len(numbers):
        _run_dequantise(weight, out, numbers=numbers)
    return out


def _run_dequantise(weight: LowBitMatrix, out: Tensor, *, first: int = 0, numbers: Tensor | None = None) -> None:
    count, width = out.shape
    _dequantise[(-(-count // 16), -(-width // 256))](
        weight.codes, *factors_of(weight), weight.codes if numbers is None else numbers, out, first, count, width,
        weight.scales.values.shape[1], **kind_of(weight), LISTED=numbers is not None, LINES=16, DEPTH=256,
        num_warps=_WARPS, **EXACT,
    )  # fmt: skip


def _check(
    x: Tensor, weight: LowBitMatrix, out: Tensor, size: int, bias: Tensor | None, residual: Tensor | None
) -> None:
    rows, width = x.shape
    expect_lines("x", x, (rows, weight.width), *_TYPES, like=weight.codes)
    expect_lines("out", out, (rows, size), *_TYPES, like=x)
    expect_lines("residual", residual, (rows, size), out.dtype, like=x)
    expect("bias", bias, (weight.num_rows,), *_TYPES, like=x)
    assert width % 32 == 0, width


def factors_of(weight: LowBitMatrix) -> tuple[Tensor, ...]:
    """Return values and halves of scales and of minimums; others stand for what there is not."""
    scales = weight.scales
    minimums = scales if weight.minimums is None else weight.minimums

    def of(factors: Factors) -> tuple[Tensor, Tensor]:
        return factors.values, factors.values if factors.halves is None else factors.halves

    return *of(scales), *of(minimums)


def kind_of(weight: LowBitMatrix) -> dict[str, Any]:
    """Return the constants by which kernels are compiled for such a matrix."""
    scales, minimums = weight.scales, weight.minimums or weight.scales
    return {
        "FORM": weight.form,
        "ZERO": weight.zero_point,
        "GROUP": weight.group,
        "SCALES_HALVED": scales.halves is not None,
        "SCALES_PER_HALF": scales.per_half,
        "LOWERED": weight.minimums is not None,
        "MINIMUMS_HALVED": minimums.halves is not None,
        "MINIMUMS_PER_HALF": minimums.per_half,
    }
