"""Steps of at most eight rows: products that read the weight once and little else, and layers made of them.

The weight [N, K], in 16 bits, is the left factor, so that its rows fill the tensor cores and the step's rows are
the eight columns that these need at least. A program computes some outputs of all rows, over all of K: no sums of
other programs, the same order for any number of rows. So a row has the same bits whatever other rows are in the
step.

    norm       the step's rows are normalised as they are loaded; the mean squares come from the product that wrote
               them, as one number a program and row
    gate       the weight is gate then up; the output is silu(gate) * up
    residual   is added to the output, and the squares of the sums are stored for the next product's norm

Numbers are rounded where the single operations round them. With dependent launches (PDL) a program loads its first
piece of the weight before the launch before it is done, which is all that it may read by then. Launches of other
libraries in between keep the order: cuBLAS's start when all before them is done, and FlashInfer's wait before they
read queries (read in prefill.cuh, decode.cuh and cascade.cuh of 0.7.2.post1). Off unless asked for: on an H200 a
step of an 8B takes 1.24 times as long with them at one row, 1.18 times at eight.

Between the attentions of two layers there are four launches; single operations take seven, and write and read the
normalised rows and gate · up in between:

    output product, residual, squares | norm, gate · up, gate | down product, residual, squares | norm, qkv
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from faser.errors import EngineError
from faser.kernels.cuda.triton.common import (
    EXACT,
    expect,
    expect_lines,
    gated,
    jit,
    jit_for_any,
    next_power_of_2,
    normalised,
)
from faser.kernels.cuda.triton.layer_ops import rms_norm
from faser.kernels.interface.blocks import BlockBuffers, Blocks, FeedForward, MixedFeedForward, NormedLinear
from faser.kernels.interface.shapes import PackedLinear

MOST_ROWS = 8
_TYPES = (torch.bfloat16, torch.float16)
_OUT_TYPES = (*_TYPES, torch.float32)
# Never tuned. Three of four pieces are on their way while one is multiplied: 24 KiB for 16 outputs,
# and on 132 processors 4096 outputs are two programs on each. Larger blocks read the step's rows less often.
_STEP = 256
_NUM_STAGES = 4
_NUM_WARPS = 4
_LARGEST_BLOCK, _LEAST_BLOCK = 32, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Squares:
    """Sums of squares of some columns of each row, for the norm of the next product. sums: [parts, 8] float32."""

    sums: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RowNorm:
    """The RMS norm of a product's input. weight: [K]; squares: of the whole rows."""

    weight: Tensor
    eps: float
    squares: Squares


@jit
def _loaded_rows(
    x, stride, depth, num_rows, width_in, factor_squares, norm, eps,
    NORM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """[STEP, ROWS]: the rows as columns, normalised if asked for."""
    row = tl.arange(0, ROWS)
    inside = (depth < width_in)[:, None] & (row < num_rows)[None, :]
    value = tl.load(x + row[None, :] * stride + depth[:, None], mask=inside, other=0.0)
    if NORM:
        weight = tl.load(norm + depth, mask=depth < width_in, other=0.0)
        value = normalised(value, factor_squares[None, :], width_in, eps, weight[:, None])
    return value


@jit
def _products(piece, rows, sums, WIDE: tl.constexpr):
    """sums + piece @ rows, float32. WIDE: widen the factors first: the interpreter multiplies no bfloat16."""
    if WIDE:
        return tl.dot(piece.to(tl.float32), rows.to(tl.float32), sums, input_precision="ieee")
    return tl.dot(piece, rows, sums)


@jit_for_any("num_rows")
def _few_rows_product(
    x, stride, weight, width, width_in, bias, norm, squares_in, num_parts, eps, residual, residual_stride, product,
    out_stride, squares_out, num_rows,
    NORM: tl.constexpr, GATE: tl.constexpr, ADDS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SQUARES: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """width: outputs, of gate and up together if GATE. PARTS: the power of 2 from num_parts up."""
    part = tl.program_id(0)
    num_outputs = width // 2 if GATE else width
    output = part * BLOCK + tl.arange(0, BLOCK)
    there = output < num_outputs
    depth = tl.arange(0, STEP)
    start = weight + output.to(tl.int64)[:, None] * width_in
    up_start = start + (width // 2).to(tl.int64) * width_in
    kind = weight.dtype.element_ty
    inside = there[:, None] & (depth < width_in)[None, :]
    piece = tl.load(start + depth[None, :], mask=inside, other=0.0)
    if GATE:
        up_piece = tl.load(up_start + depth[None, :], mask=inside, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.arange(0, ROWS)
    squares = tl.zeros((ROWS,), tl.float32)
    if NORM:
        parts = tl.arange(0, PARTS)
        found = tl.load(
            squares_in + parts[:, None] * ROWS + row[None, :], mask=(parts < num_parts)[:, None], other=0.0
        )
        squares = tl.sum(found, 0)
    rows = _loaded_rows(x, stride, depth, num_rows, width_in, squares, norm, eps, NORM, ROWS)
    sums = _products(piece, rows, tl.zeros((BLOCK, ROWS), tl.float32), WIDE)
    if GATE:
        up_sums = _products(up_piece, rows, tl.zeros((BLOCK, ROWS), tl.float32), WIDE)
    for at in range(STEP, width_in, STEP):
        place = at + depth
        inside = there[:, None] & (place < width_in)[None, :]
        rows = _loaded_rows(x, stride, place, num_rows, width_in, squares, norm, eps, NORM, ROWS)
        sums = _products(tl.load(start + place[None, :], mask=inside, other=0.0), rows, sums, WIDE)
        if GATE:
            up_sums = _products(tl.load(up_start + place[None, :], mask=inside, other=0.0), rows, up_sums, WIDE)
    if ADDS:
        sums += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)[:, None]
        if GATE:
            up_sums += tl.load(bias + width // 2 + output, mask=there, other=0.0).to(tl.float32)[:, None]
    if GATE:
        sums = gated(sums.to(kind), up_sums.to(kind))
    mask = there[:, None] & (row < num_rows)[None, :]
    if HAS_RESIDUAL:
        before = residual + row[None, :] * residual_stride + output[:, None]
        sums += tl.load(before, mask=mask, other=0.0).to(tl.float32)
    rounded = sums.to(product.dtype.element_ty)
    tl.store(product + row[None, :] * out_stride + output[:, None], rounded, mask=mask)
    if SQUARES:
        wide = tl.where(mask, rounded.to(tl.float32), 0.0)
        tl.store(squares_out + part * ROWS + row, tl.sum(wide * wide, 0))


class FewRowsProduct:
    """Launches products of up to MOST_ROWS rows. num_processors: that the programs should fill.

    dependent: launch each as soon as the one before it lets it (programmatic dependent launch, compute capability
    9.0 and later).
    """

    def __init__(self, num_processors: int, *, dependent: bool = False) -> None:
        self._num_processors = num_processors
        self._dependent = dependent

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
        *,
        norm: RowNorm | None = None,
        gate: bool = False,
        residual: Tensor | None = None,
        squares: bool = False,
    ) -> Squares | None:
        """out = weight @ x (+ bias) (+ residual), or silu(gate) * up of that. Returns its squares if asked for.

        x: [R, K], R at most MOST_ROWS. weight: [N, K], contiguous, bfloat16 or float16, the type of x. bias: [N].
        out: [R, N], [R, N / 2] if gate; of any of these types or float32. residual: [R, N] of out's type, may be
        out. x and out: each row contiguous, no overlap. Raises EngineError that names what does not fit.
        """
        num_rows, width_in = x.shape
        width = len(weight)
        if num_rows > MOST_ROWS:
            raise EngineError(f"{num_rows} rows; the kernel takes at most {MOST_ROWS}")
        if gate and (width % 2 or residual is not None):
            raise EngineError(f"a gate has no residual and an even number of outputs; there are {width}")
        expect_lines("x", x, (num_rows, width_in), *_TYPES, like=x)
        expect("weight", weight, (width, width_in), x.dtype, like=x)
        num_outputs = width // 2 if gate else width
        expect_lines("out", out, (num_rows, num_outputs), *_OUT_TYPES, like=x)
        if bias is not None:
            expect("bias", bias, (width,), *_TYPES, like=x)
        if residual is not None:
            expect_lines("residual", residual, (num_rows, num_outputs), out.dtype, like=x)
        block = self._block(num_outputs)
        num_programs = -(-num_outputs // block)
        found = Squares(sums=torch.empty(num_programs, MOST_ROWS, device=x.device)) if squares else None
        num_parts = 1
        if norm is not None:
            expect("norm", norm.weight, (width_in,), torch.float32, x.dtype, like=x)
            num_parts = len(norm.squares.sums)
            expect("squares", norm.squares.sums, (num_parts, MOST_ROWS), torch.float32, like=x)
        if num_rows:
            options = {"launch_pdl": True} if self._dependent else {}
            _few_rows_product[(num_programs,)](
                x, x.stride(0), weight, width, width_in, x if bias is None else bias,
                x if norm is None else norm.weight, out if norm is None else norm.squares.sums, num_parts,
                0.0 if norm is None else norm.eps, out if residual is None else residual,
                out.stride(0) if residual is None else residual.stride(0), out, out.stride(0),
                out if found is None else found.sums, num_rows, NORM=norm is not None, GATE=gate,
                ADDS=bias is not None, HAS_RESIDUAL=residual is not None, SQUARES=squares, ROWS=MOST_ROWS,
                PARTS=next_power_of_2(num_parts), BLOCK=block, STEP=_STEP, PDL=self._dependent,
                WIDE=x.device.type == "cpu", num_warps=_NUM_WARPS, num_stages=_NUM_STAGES, **options, **EXACT,
            )  # fmt: skip
        return found

    def _block(self, num_outputs: int) -> int:
        """Outputs of a program: as many as leave every processor a program."""
        block = _LARGEST_BLOCK
        while block > _LEAST_BLOCK and -(-num_outputs // block) < self._num_processors:
            block //= 2
        return block


class FewRowBlocks:
    """See Blocks. otherwise: for more rows, and for products that are not in 16 bits."""

    def __init__(self, product: FewRowsProduct, otherwise: Blocks) -> None:
        self._product = product
        self._otherwise = otherwise

    def normed_linear(self, hidden: Tensor, product: NormedLinear, out: Tensor, buffers: BlockBuffers) -> Tensor:
        """See Blocks. The norm is a launch of its own: the mean squares of these rows are not known yet."""
        if len(hidden) > MOST_ROWS or not _fits(product.linear):
            return self._otherwise.normed_linear(hidden, product, out, buffers)
        normed = rms_norm(hidden, product.norm, product.eps, buffers.normed)
        self._product(normed, product.linear.weight, product.linear.bias, out)
        return out

    def feed_forward(
        self,
        mixed: Tensor,
        hidden: Tensor,
        block: FeedForward | MixedFeedForward,
        following: NormedLinear | None,
        out: Tensor,
        buffers: BlockBuffers,
    ) -> None:
        few = len(hidden) <= MOST_ROWS and all(map(_fits, block.products))
        if isinstance(block, MixedFeedForward) or not block.is_usual or not few:
            self._otherwise.feed_forward(mixed, hidden, block, following, out, buffers)
            return
        squares = self._add(mixed, block.attention_out, hidden)
        self._normed(hidden, block.gate_up, squares, buffers.inner, gate=True)
        squares = self._add(buffers.inner, block.down, hidden)
        if following is None:
            return
        if _fits(following.linear):
            self._normed(hidden, following, squares, out, gate=False)
        else:
            self._otherwise.normed_linear(hidden, following, out, buffers)

    def _add(self, x: Tensor, linear: PackedLinear, hidden: Tensor) -> Squares:
        squares = self._product(x, linear.weight, linear.bias, hidden, residual=hidden, squares=True)
        assert squares is not None
        return squares

    def _normed(self, hidden: Tensor, product: NormedLinear, squares: Squares, out: Tensor, *, gate: bool) -> None:
        norm = RowNorm(weight=product.norm, eps=product.eps, squares=squares)
        self._product(hidden, product.linear.weight, product.linear.bias, out, norm=norm, gate=gate)


def _fits(linear: PackedLinear) -> bool:
    """Whether a packed product is one in 16 bits."""
    weight = getattr(linear, "weight", None)
    return isinstance(weight, Tensor) and weight.dtype in (torch.bfloat16, torch.float16)
