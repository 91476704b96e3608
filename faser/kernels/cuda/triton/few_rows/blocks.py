"""The units of a layer for at most eight rows: four launches between the attentions of two layers.

    output product, residual, squares | norm, gate · up, gate | down product, residual, squares | norm, qkv

Single operations take seven, and write and read the normalised rows and gate · up in between.
"""

from typing import Protocol

import torch
from torch import Tensor

from faser.kernels.cuda.triton.few_rows.product import MOST_ROWS, FewRowsProduct, RowNorm, Squares
from faser.kernels.interface.blocks import BlockBuffers, Blocks, FeedForward, NormedLinear
from faser.kernels.interface.shapes import PackedLinear


class WeightAndBias(Protocol):
    """A packed product in 16 bits. weight: [N, K]; bias: [N]."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...


class FewRowBlocks:
    """See Blocks. otherwise: for more rows, and for products that are not in 16 bits."""

    def __init__(self, product: FewRowsProduct, otherwise: Blocks, rms_norm: "RmsNormLaunch") -> None:
        self._product = product
        self._otherwise = otherwise
        self._rms_norm = rms_norm

    def normed_linear(self, hidden: Tensor, product: NormedLinear, out: Tensor, buffers: BlockBuffers) -> Tensor:
        """See Blocks. The norm is a launch of its own: the mean squares of these rows are not known yet."""
        if len(hidden) > MOST_ROWS or not _fits(product.linear):
            return self._otherwise.normed_linear(hidden, product, out, buffers)
        normed = self._rms_norm(hidden, product.norm, product.eps, buffers.normed)
        self._product(normed, product.linear.weight, product.linear.bias, out)
        return out

    def feed_forward(
        self,
        mixed: Tensor,
        hidden: Tensor,
        block: FeedForward,
        following: NormedLinear | None,
        out: Tensor,
        buffers: BlockBuffers,
    ) -> None:
        linears = (block.attention_out, block.gate_up.linear, block.down)
        if len(hidden) > MOST_ROWS or not all(map(_fits, linears)):
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

    def _add(self, x: Tensor, linear: WeightAndBias, hidden: Tensor) -> Squares:
        squares = self._product(x, linear.weight, linear.bias, hidden, residual=hidden, squares=True)
        assert squares is not None
        return squares

    def _normed(self, hidden: Tensor, product: NormedLinear, squares: Squares, out: Tensor, *, gate: bool) -> None:
        norm = RowNorm(weight=product.norm, eps=product.eps, squares=squares)
        self._product(hidden, product.linear.weight, product.linear.bias, out, norm=norm, gate=gate)


class RmsNormLaunch(Protocol):
    """See triton/norm.py."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float, out: Tensor, /) -> Tensor: ...


def _fits(linear: PackedLinear) -> bool:
    """Whether a packed product is one in 16 bits."""
    weight = getattr(linear, "weight", None)
    return isinstance(weight, Tensor) and weight.dtype in (torch.bfloat16, torch.float16)
