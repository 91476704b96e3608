"""Units of layers for few rows: a product with its norm, gate or residual is one launch, where that is faster.

Which way is faster, and whether it is right on this GPU, is measured when a shape of product is first needed with
so many rows, which is before graphs are captured. The first way is always that of more rows.

A row's bits do not depend on how many rows there are, up to MOST_ROWS, as long as the same way was chosen for all
of these numbers; see triton/few_rows.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from faser.kernels.cuda.choices import Choices
from faser.kernels.cuda.flashinfer.device_kernels import CudaLinear, FewRows
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.blocks import (
    BlockBuffers,
    Blocks,
    FeedForward,
    MixedFeedForward,
    NormedLinear,
    columns_of,
)
from faser.kernels.interface.forward import SeparateBlocks
from faser.kernels.interface.shapes import PackedLinear

MOST_ROWS = 8
_SEPARATE = "separate"
_OUTPUTS = {f"{outputs} outputs": outputs for outputs in (8, 16, 32)}  # ways, by what a program computes
_TOLERANCE = 2.0**-5  # of the largest value: roundings of bfloat16 in other places


@dataclass(frozen=True, slots=True)
class _Unit:
    """A product and what belongs to it. norm: None: the rows come as they are. activation: empty: none.

    size: of its results, with `adds` added to what is there.
    """

    product: CudaLinear
    size: int
    dtype: torch.dtype
    norm: NormedLinear | None = None
    activation: str = ""
    adds: bool = False

    def key(self, rows: int) -> str:
        weight = self.product.weight
        parts = [f"{rows} rows", f"{len(weight)} x {weight.shape[1]}", f"{weight.dtype} to {self.dtype}"]
        parts += ["norm"] * (self.norm is not None) + ["bias"] * (self.product.bias is not None)
        parts += [self.activation] * bool(self.activation) + ["residual"] * self.adds
        return ", ".join(parts).replace("torch.", "")


class FewRowBlocks(SeparateBlocks):
    """Blocks of few rows. others: for more rows, and for products that are not in 16 bits."""

    def __init__(self, backend: Backend, others: Blocks, run: FewRows, choices: Choices) -> None:
        super().__init__(backend)
        self._others, self._separate = others, SeparateBlocks(backend)
        self._run, self._choices = run, choices
        self._chosen: dict[tuple[object, ...], int | None] = {}  # outputs of a program; None: separate launches

    def normed_linear(self, hidden: Tensor, product: NormedLinear, out: Tensor, buffers: BlockBuffers) -> Tensor:
        packed = product.linear
        if not self._takes(hidden, packed):
            return self._others.normed_linear(hidden, product, out, buffers)
        unit = _Unit(packed, out.shape[1], out.dtype, product)

        def separate(rows: Tensor, found: Tensor) -> Tensor:
            return self._separate.normed_linear(rows, product, found, buffers)

        return self._compute(unit, hidden, out, separate)

    def feed_forward(
        self,
        mixed: Tensor,
        hidden: Tensor,
        block: FeedForward | MixedFeedForward,
        following: NormedLinear | None,
        out: Tensor,
        buffers: BlockBuffers,
    ) -> None:
        takes = self._takes(hidden, block.attention_out) and all(
            isinstance(each, CudaLinear) for each in block.products
        )
        run = super().feed_forward if takes else self._others.feed_forward
        run(mixed, hidden, block, following, out, buffers)

    def _normed_gate(
        self, hidden: Tensor, product: NormedLinear, activation: str, inner: Tensor, buffers: BlockBuffers
    ) -> None:
        unit = _Unit(product.linear, inner.shape[1], inner.dtype, product, activation)

        def separate(rows: Tensor, found: Tensor) -> Tensor:
            gate_up = columns_of(buffers.gate_up, 2 * unit.size)
            return self._backend.gate(
                self._separate.normed_linear(rows, product, gate_up, buffers), found, activation
            )

        self._compute(unit, hidden, inner, separate)

    def _add(
        self,
        x: Tensor,
        product: PackedLinear,
        eps: float,
        norm: Tensor | None,
        hidden: Tensor,
        buffers: BlockBuffers,
    ) -> None:
        if norm is not None:
            super()._add(x, product, eps, norm, hidden, buffers)
            return

        def separate(rows: Tensor, found: Tensor) -> Tensor:
            summed: Tensor = self._backend.linear(rows, product, found, residual=found)
            return summed

        self._compute(_Unit(product, hidden.shape[1], hidden.dtype, adds=True), x, hidden, separate)

    @staticmethod
    def _takes(x: Tensor, packed: PackedLinear) -> bool:
        return 0 < len(x) <= MOST_ROWS and isinstance(packed, CudaLinear)

    def _compute(
        self, unit: _Unit, x: Tensor, out: Tensor, separate: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """separate: the unit of (x, out) in separate launches."""
        # By the numbers alone, since every layer asks in every eager step.
        known = (
            len(x),
            unit.product.weight.shape,
            unit.product.bias is None,
            out.dtype,
            unit.activation,
            unit.adds,
        )
        if known not in self._chosen:
            self._chosen[known] = self._choose(unit, x, separate)
        outputs = self._chosen[known]
        return separate(x, out) if outputs is None else self._in_one(unit, x, out, outputs)

    def _choose(self, unit: _Unit, x: Tensor, separate: Callable[[Tensor, Tensor], Tensor]) -> int | None:
        """Measure the ways on rows of random numbers: those of a step at start may all be zero."""
        rows = torch.randn(x.shape, dtype=torch.float32, device=x.device).to(x.dtype)
        start = torch.randn((len(x), unit.size), dtype=torch.float32, device=x.device).to(unit.dtype)

        def way(outputs: int | None) -> Tensor:
            out = start.clone()  # of all ways, since those that add change it
            return separate(rows, out) if outputs is None else self._in_one(unit, rows, out, outputs)

        ways = {name: partial(way, outputs) for name, outputs in ((_SEPARATE, None), *_OUTPUTS.items())}
        return _OUTPUTS.get(self._choices.fastest(unit.key(len(x)), ways, tolerance=_TOLERANCE))

    def _in_one(self, unit: _Unit, x: Tensor, out: Tensor, outputs: int) -> Tensor:
        return self._run(
            x,
            unit.product.weight,
            out,
            norm=None if unit.norm is None else unit.norm.norm,
            eps=0.0 if unit.norm is None else unit.norm.eps,
            bias=unit.product.bias,
            residual=out if unit.adds else None,
            activation=unit.activation,
            outputs=outputs,
        )
