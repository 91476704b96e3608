"""The units of a layer with quantised products: one launch between two products, which are cuBLAS's.

Between the attentions of two layers there are nine launches; single operations take fifteen.
"""

from torch import Tensor

from faser.kernels.cuda.triton.fp8_rows import add_norm, gate
from faser.kernels.cuda.triton.scaled_fp8 import ScaledFp8, quantised_rows
from faser.kernels.interface.blocks import BlockBuffers, Blocks, FeedForward, NormedLinear
from faser.kernels.interface.fp8 import Fp8Linear, Fp8Rows, UnscaledProduct


class Fp8Blocks:
    """See Blocks: the numbers of the single operations. separate: for units with products in 16 bits."""

    def __init__(self, products: ScaledFp8, separate: Blocks) -> None:
        self._products = products
        self._separate = separate

    def normed_linear(self, hidden: Tensor, product: NormedLinear, out: Tensor, buffers: BlockBuffers) -> Tensor:
        if not isinstance(product.linear, Fp8Linear):
            return self._separate.normed_linear(hidden, product, out, buffers)
        return self._products.scale(self._sums(None, hidden, product), out, None)

    def feed_forward(
        self,
        mixed: Tensor,
        hidden: Tensor,
        block: FeedForward,
        following: NormedLinear | None,
        out: Tensor,
        buffers: BlockBuffers,
    ) -> None:
        products, linears = self._products, (block.attention_out, block.gate_up.linear, block.down)
        if not all(isinstance(each, Fp8Linear) for each in linears):
            self._separate.feed_forward(mixed, hidden, block, following, out, buffers)
            return
        attended = products.sums(products.quantise(mixed), block.attention_out)
        gate_up = self._sums(attended, hidden, block.gate_up)
        inner = quantised_rows(len(hidden), buffers.inner.shape[1], hidden.device)
        gate(gate_up, hidden.dtype, inner.values, inner.scales)
        fed = products.sums(inner, block.down)
        if following is not None and isinstance(following.linear, Fp8Linear):
            products.scale(self._sums(fed, hidden, following), out, None)
            return
        products.scale(fed, hidden, hidden)
        if following is not None:
            self._separate.normed_linear(hidden, following, out, buffers)

    def _sums(self, before: UnscaledProduct | None, hidden: Tensor, product: NormedLinear) -> UnscaledProduct:
        """The product of the normalised residual stream, to which the product before it is added first."""
        rows: Fp8Rows = quantised_rows(len(hidden), hidden.shape[1], hidden.device)
        add_norm(before, hidden, product.norm, product.eps, rows.values, rows.scales)
        return self._products.sums(rows, product.linear)
