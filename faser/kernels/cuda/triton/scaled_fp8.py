"""8-bit products on NVIDIA's tensor cores: cuBLAS between Triton kernels.

cuBLAS multiplies the values and gives float32 sums; the next launch applies scales, bias and residual. In a layer
that launch goes on: it normalises or gates the rows, and quantises them for the next product. cuBLAS
could apply a scale per row itself, but only on compute capability 9, and it has no such kernel for few rows of
many columns, which is what decoding needs (pytorch/ao, issue 4582).

torch's requirements on dtypes, sizes and strides were read in its sources (ScaledBlas.cpp).
"""

import torch
from torch import Tensor

from faser.errors import ConfigError
from faser.kernels.interface.blocks import BlockBuffers, Blocks, FeedForward, MixedFeedForward, NormedLinear
from faser.kernels.interface.fp8 import FP8, Fp8Linear, Fp8Products, Fp8Rows, UnscaledProduct
from faser.kernels.interface.shapes import PackedLinear

LOWEST_CAPABILITY = (8, 9)
MULTIPLE = 16  # of both sizes of a weight: 16 bytes are what the tensor cores load at once
# A product of fewer rows takes longer (vllm, pull request 4691); it is padded with rows of arbitrary values.
LEAST_ROWS = 17


class ScaledFp8:
    """Products of 8-bit floats. Allocates intermediate tensors, from a graph's pool on capture.

    A product alone is three launches, in a layer two; with scales of groups it is one, of rows in 16 bits.
    """

    def __init__(self, device: torch.device) -> None:
        from faser.kernels.cuda.triton.fp8_ops import quantise_rows, scale_sums
        from faser.kernels.cuda.triton.grouped_fp8 import grouped_product

        self._grouped_product = grouped_product
        self._quantise_rows = quantise_rows
        self._scale_sums = scale_sums
        self._one = torch.ones((), dtype=torch.float32, device=device)

    def check(self, weight: Fp8Rows) -> None:
        rows, columns = weight.values.shape
        if rows % MULTIPLE or columns % MULTIPLE:
            raise ConfigError(
                f"fp8 products need weights with sizes that are multiples of {MULTIPLE}; one is {rows} x {columns}"
            )
        if weight.group is not None and weight.group % MULTIPLE:
            raise ConfigError(
                f"fp8 products need groups of a multiple of {MULTIPLE} columns; one has {weight.group}"
            )

    def blocks(self, separate: Blocks) -> Blocks:
        return Fp8Blocks(self, separate)

    def linear(self, x: Tensor, packed: Fp8Linear, out: Tensor, residual: Tensor | None) -> Tensor:
        if not packed.by_row:
            return self._grouped_product(x, packed.weight, packed.bias, out, residual)
        return self.scale(self.sums(self.quantise(x), packed), out, residual)

    def quantise(self, x: Tensor) -> Fp8Rows:
        """The rows of x [R, K] for `sums`. One launch."""
        rows = quantised_rows(len(x), x.shape[1], x.device)
        self._quantise_rows(x, rows.values, rows.scales)
        return rows

    def sums(self, rows: Fp8Rows, packed: Fp8Linear) -> UnscaledProduct:
        """The product of rows from quantised_rows with a weight. One launch."""
        count, width = rows.values.shape
        values = rows.values.as_strided((max(count, LEAST_ROWS), width), (width, 1))
        # Fast accumulation would keep some 14 bits of a sum (arXiv:2412.19437, section 3.3.2). The public
        # scaled_mm calls the same function on a GPU, but has no implementation on a CPU, where this can be tested.
        sums = torch._scaled_mm(
            values,
            packed.weight.values.t(),
            scale_a=self._one,
            scale_b=self._one,
            out_dtype=torch.float32,
            use_fast_accum=False,
        )
        return UnscaledProduct(
            sums=sums[:count], row_scales=rows.scales, column_scales=packed.weight.scales, bias=packed.bias
        )

    def scale(self, product: UnscaledProduct, out: Tensor, residual: Tensor | None) -> Tensor:
        """The end of a product that nothing else finishes. One launch."""
        scales = (product.row_scales, product.column_scales)
        return self._scale_sums(product.sums, *scales, product.bias, residual, out)


class Fp8Blocks:
    """Blocks with the numbers of the single operations. separate: for units with products in 16 bits.

    Between the attentions of two layers there are nine launches; single operations take fifteen.
    """

    def __init__(self, products: ScaledFp8, separate: Blocks) -> None:
        from faser.kernels.cuda.triton.fp8_ops import add_norm, gate

        self._add_norm, self._gate = add_norm, gate
        self._products = products
        self._separate = separate

    def normed_linear(self, hidden: Tensor, product: NormedLinear, out: Tensor, buffers: BlockBuffers) -> Tensor:
        if not by_row(product.linear):
            return self._separate.normed_linear(hidden, product, out, buffers)
        return self._products.scale(self._sums(None, hidden, product), out, None)

    def feed_forward(
        self,
        mixed: Tensor,
        hidden: Tensor,
        block: FeedForward | MixedFeedForward,
        following: NormedLinear | None,
        out: Tensor,
        buffers: BlockBuffers,
    ) -> None:
        products = self._products
        if isinstance(block, MixedFeedForward) or not joins(block):
            self._separate.feed_forward(mixed, hidden, block, following, out, buffers)
            return
        attended = products.sums(products.quantise(mixed), block.attention_out)
        gate_up = self._sums(attended, hidden, block.gate_up)
        inner = quantised_rows(len(hidden), buffers.inner.shape[1], hidden.device)
        self._gate(gate_up, hidden.dtype, inner.values, inner.scales)
        fed = products.sums(inner, block.down)
        if following is not None and by_row(following.linear):
            products.scale(self._sums(fed, hidden, following), out, None)
            return
        products.scale(fed, hidden, hidden)
        if following is not None:
            self._separate.normed_linear(hidden, following, out, buffers)

    def _sums(self, before: UnscaledProduct | None, hidden: Tensor, product: NormedLinear) -> UnscaledProduct:
        """The product of the normalised residual stream, to which the product before it is added first."""
        rows: Fp8Rows = quantised_rows(len(hidden), hidden.shape[1], hidden.device)
        self._add_norm(before, hidden, product.norm, product.eps, rows.values, rows.scales)
        return self._products.sums(rows, product.linear)


def joins(block: FeedForward | MixedFeedForward) -> bool:
    """Return whether Fp8Blocks computes this block in fewer launches than its operations by themselves."""
    is_usual = isinstance(block, FeedForward) and block.is_usual
    return is_usual and all(by_row(each) for each in block.products)


def by_row(packed: PackedLinear) -> bool:
    """Return whether a product is in 8 bits, with one scale for each row of its weight."""
    return isinstance(packed, Fp8Linear) and packed.by_row


def quantised_rows(count: int, width: int, device: torch.device) -> Fp8Rows:
    """Room for the rows of a product, within a tensor that has at least LEAST_ROWS of them."""
    values = torch.empty((max(count, LEAST_ROWS), width), dtype=FP8, device=device)
    return Fp8Rows(values=values[:count], scales=torch.empty(count, dtype=torch.float32, device=device))


def scaled_fp8(device: torch.device, capability: tuple[int, int]) -> Fp8Products | None:
    """The products for a device of this compute capability; None: its tensor cores have none. Imports Triton."""
    return ScaledFp8(device) if capability >= LOWEST_CAPABILITY else None
