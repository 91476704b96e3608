"""Units of layers for few rows: a product with its norm, gate or residual is one launch, where that is faster.

Which way is faster, and whether it is right on this GPU, is measured when a shape of product is first needed with
so many rows, which is before graphs are captured. The first way is always that of more rows.

With weights in 8 bits that first way rounds the rows to 8 bits as well, and joins units. So results of the others
are compared with the product of the weights that the codes stand for, and the time of all units with that of a
layer in the first way.

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
from faser.kernels.cuda.low_bit import CudaLowBit
from faser.kernels.cuda.triton.scaled_fp8 import joins
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
from faser.kernels.interface.fp8 import Fp8Linear
from faser.kernels.interface.shapes import PackedLinear
from faser.types.activation import Activation

MOST_ROWS = 8
_SEPARATE = "separate"
_OUTPUTS = {f"{outputs} outputs": outputs for outputs in (8, 16, 32)}  # ways, by what a program computes
_MOST_OF_CODES, _MOST_OUTPUTS_OF_CODES = 4, 16  # rows and outputs with low-bit weights: triton/low_bit.py
_IN_UNITS = "units"
_TOLERANCE = 2.0**-5  # of the largest value: roundings of bfloat16 in other places
_FP8_TOLERANCE = 2.0**-3  # rows rounded to 8 bits, by up to 2**-4 of each value, in up to four products
_LINES_AT_ONCE = 4096  # of a weight in 8 bits; bounds the float32 copies that comparing makes


@dataclass(frozen=True, slots=True)
class _Unit:
    """A product and what belongs to it. norm: None: the rows come as they are. activation: empty: none.

    size: of its results, with `adds` added to what is there.
    """

    product: CudaLinear | Fp8Linear | CudaLowBit
    size: int
    dtype: torch.dtype
    norm: NormedLinear | None = None
    activation: str = ""
    adds: bool = False

    @property
    def stored(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight [N, K] as it is stored, and in 8 bits the scales of its outputs."""
        product = self.product
        assert not isinstance(product, CudaLowBit), "codes have a form of their own"
        if isinstance(product, Fp8Linear):
            return product.weight.values, product.weight.scales
        return product.weight, None

    @property
    def kind(self) -> tuple[object, ...]:
        """Return the sizes and the type of the weight."""
        if isinstance(self.product, CudaLowBit):
            return (*self.product.shape, *self.product.parts[0].kind)
        weight, _ = self.stored
        return (*weight.shape, weight.dtype)

    def key(self, x: Tensor) -> str:
        lines, width, *kind = self.kind
        parts = [f"{len(x)} rows", f"{lines} x {width}"]
        parts += [f"{x.dtype} by {' '.join(map(str, kind))} to {self.dtype}"]
        parts += ["norm"] * (self.norm is not None) + ["bias"] * (self.product.bias is not None)
        parts += [self.activation] * bool(self.activation) + ["residual"] * self.adds
        return ", ".join(parts).replace("torch.", "")


class FewRowBlocks(SeparateBlocks):
    """Blocks of few rows. others: for more rows, and for products that none of the kernels takes.

    run: multiplies in 16 bits and in fp8. of_codes: with low-bit weights of one kind; None: there is no kernel.
    """

    def __init__(
        self, backend: Backend, others: Blocks, run: FewRows, choices: Choices, of_codes: FewRows | None = None
    ) -> None:
        super().__init__(backend)
        self._others, self._run, self._choices, self._of_codes = others, run, choices, of_codes
        self._chosen: dict[tuple[object, ...], int | None] = {}  # outputs of a program; None: separate launches
        self._in_units: dict[tuple[object, ...], bool] = {}  # of blocks that others join

    def normed_linear(self, hidden: Tensor, product: NormedLinear, out: Tensor, buffers: BlockBuffers) -> Tensor:
        packed = product.linear
        if not self._takes(hidden, packed):
            return self._others.normed_linear(hidden, product, out, buffers)
        unit = _Unit(packed, out.shape[1], out.dtype, product)

        def separate(rows: Tensor, found: Tensor) -> Tensor:
            return self._others.normed_linear(rows, product, found, buffers)

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
        takes = self._takes(hidden, *block.products)
        if takes and joins(block):
            takes = self._is_faster_in_units(mixed, hidden, block, following, out, buffers)
        run = super().feed_forward if takes else self._others.feed_forward
        run(mixed, hidden, block, following, out, buffers)

    def _is_faster_in_units(
        self,
        mixed: Tensor,
        hidden: Tensor,
        block: FeedForward | MixedFeedForward,
        following: NormedLinear | None,
        out: Tensor,
        buffers: BlockBuffers,
    ) -> bool:
        """Measure whether the units of a block, each in its fastest way, take less than others' launches."""
        products = block.products if following is None else (*block.products, following.linear)
        known = (
            len(hidden),
            hidden.dtype,
            *(each.weight.shape for each in products),
            *(each.bias is None for each in products),
        )
        if known not in self._in_units:
            attended, before = (_random_like(each) for each in (mixed, hidden))

            def way(run: Callable[..., None]) -> Tensor:
                rows, found = before.clone(), torch.empty_like(out)
                run(attended, rows, block, following, found, buffers)
                return rows if following is None else found

            runs = {_SEPARATE: self._others.feed_forward, _IN_UNITS: super().feed_forward}
            ways = {name: partial(way, run) for name, run in runs.items()}
            ways[_IN_UNITS]()  # chooses for each unit, which is not to be timed
            key = f"layer in 8 bits, {', '.join(map(str, known))}"
            self._in_units[known] = self._choices.fastest(key, ways, tolerance=_FP8_TOLERANCE) == _IN_UNITS
        return self._in_units[known]

    def _normed_gate(
        self, hidden: Tensor, product: NormedLinear, activation: Activation, inner: Tensor, buffers: BlockBuffers
    ) -> None:
        unit = _Unit(product.linear, inner.shape[1], inner.dtype, product, activation)

        def separate(rows: Tensor, found: Tensor) -> Tensor:
            gate_up = columns_of(buffers.gate_up, 2 * unit.size)
            return self._backend.gate(
                self._others.normed_linear(rows, product, gate_up, buffers), found, activation
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

    def _takes(self, x: Tensor, *products: PackedLinear) -> bool:
        def is_known(product: PackedLinear) -> bool:
            if isinstance(product, CudaLowBit):
                return self._of_codes is not None and product.single is not None and len(x) <= _MOST_OF_CODES
            return isinstance(product, CudaLinear | Fp8Linear)

        return 0 < len(x) <= MOST_ROWS and all(map(is_known, products))

    def _compute(
        self, unit: _Unit, x: Tensor, out: Tensor, separate: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """separate: the unit of (x, out) in separate launches."""
        # By the numbers alone, since every layer asks in every eager step.
        known = (
            len(x),
            *unit.kind,
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
        rows = _random_like(x)
        start = torch.randn((len(x), unit.size), dtype=torch.float32, device=x.device).to(unit.dtype)

        def way(outputs: int | None) -> Tensor:
            out = start.clone()  # of all ways, since those that add change it
            return separate(rows, out) if outputs is None else self._in_one(unit, rows, out, outputs)

        outputs = {
            name: num
            for name, num in _OUTPUTS.items()
            if num <= _MOST_OUTPUTS_OF_CODES or not isinstance(unit.product, CudaLowBit)
        }
        ways = {name: partial(way, num) for name, num in ((_SEPARATE, None), *outputs.items())}
        expected = partial(self._exact, unit, rows, start) if isinstance(unit.product, Fp8Linear) else None
        chosen = self._choices.fastest(unit.key(x), ways, tolerance=_TOLERANCE, expected=expected)
        return _OUTPUTS.get(chosen)

    def _exact(self, unit: _Unit, x: Tensor, start: Tensor) -> Tensor:
        """Compute a unit with the weights that its codes stand for, float32."""
        values, scales = unit.stored
        assert scales is not None, "weights in 16 bits are compared with torch's product"
        wide = x.float()
        if unit.norm is not None:
            wide *= torch.rsqrt(wide.square().mean(-1, keepdim=True) + unit.norm.eps) * unit.norm.norm
        firsts = range(0, len(values), _LINES_AT_ONCE)
        found = torch.cat([wide @ values[at : at + _LINES_AT_ONCE].float().t() for at in firsts], 1) * scales
        if unit.product.bias is not None:
            found += unit.product.bias
        if unit.activation:
            found = self._backend.gate(
                found.to(x.dtype), torch.empty_like(start), Activation(unit.activation)
            ).float()
        return found + start if unit.adds else found

    def _in_one(self, unit: _Unit, x: Tensor, out: Tensor, outputs: int) -> Tensor:
        if isinstance(unit.product, CudaLowBit):
            assert self._of_codes is not None, "the unit was not taken"
            multiply = partial(self._of_codes, x, unit.product.single, out)
        else:
            weight, scales = unit.stored
            multiply = partial(self._run, x, weight, out, scales=scales)
        return multiply(
            norm=None if unit.norm is None else unit.norm.norm,
            eps=0.0 if unit.norm is None else unit.norm.eps,
            bias=unit.product.bias,
            residual=out if unit.adds else None,
            activation=unit.activation,
            outputs=outputs,
        )


def _random_like(x: Tensor) -> Tensor:
    return torch.randn(x.shape, dtype=torch.float32, device=x.device).to(x.dtype)
