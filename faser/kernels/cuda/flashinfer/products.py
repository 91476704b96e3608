"""Products by the fastest kernel: in 16 bits torch's, or one of FlashInfer's (product_kernels.py).

Numbers of rows fall into classes. When a shape of product is first needed in a class, before graphs are captured,
its ways are measured with the most rows of the class, and the fastest one serves the class. Products with more
rows, of prompts, stay torch's: cuBLAS is near the limit there.

A product by FlashInfer adds no residual; a launch of its own does, and is measured with it. Weights in 8-bit
floats with scales of groups have ways of their own (grouped_products.py).
"""

import logging
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from faser.kernels.cuda.choices import Choices
from faser.kernels.cuda.device import is_carved_out
from faser.kernels.cuda.flashinfer.device_kernels import CudaLinear
from faser.kernels.cuda.flashinfer.product_kernels import Product
from faser.kernels.interface.fp8 import Fp8Linear

CLASSES = (8, 16, 32, 64, 128, 256, 512)  # most rows of each
_TORCH = "torch"
_TOLERANCE = 2.0**-6  # of the largest value: roundings of bfloat16
_MOST_BYTES = 64 << 20  # of a result: measuring holds several, and at start memory is nearly full

_log = logging.getLogger("faser")

TorchProduct = Callable[[Tensor, Any, Tensor, Tensor | None], Tensor]  # see FlashInferBackend.linear


class ProductWays(Protocol):
    """Ways to compute a product, by name."""

    def ways(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> dict[str, Product]: ...


Ways = Callable[[Tensor, Any, Tensor], Mapping[str, TorchProduct]]
"""Return the ways to compute out of x by a packed weight, by name."""


class Products:
    """Products of one kind of one backend. ways: beside the reference, whose name is `first`.

    tolerance: by how much a way may differ from it, as a share of the largest value.
    """

    def __init__(
        self,
        ways: Ways,
        reference: TorchProduct,
        choices: Choices,
        *,
        first: str = _TORCH,
        tolerance: float = _TOLERANCE,
    ) -> None:
        self._ways, self._reference, self._choices = ways, reference, choices
        self._first, self._tolerance = first, tolerance
        # By number of rows and by class; None: the reference.
        self._chosen: dict[tuple[Any, ...], TorchProduct | None] = {}
        self._of_classes: dict[tuple[Any, ...], TorchProduct | None] = {}

    def linear(self, x: Tensor, packed: Any, out: Tensor, residual: Tensor | None) -> Tensor:
        """See FlashInferBackend.linear."""
        known = (len(x), packed.weight.shape, _form(packed), packed.bias is None, out.dtype, residual is None)
        # Kernels were measured on all processors; torch's are cut for the fewer of a lane.
        takes = x.dtype is torch.bfloat16 and x.is_contiguous() and out.is_contiguous()
        if takes and not is_carved_out():
            if known not in self._chosen:
                self._chosen[known] = self._of_class(known, x, packed, out)
            product = self._chosen[known]
            if product is not None:
                try:
                    return product(x, packed, out, residual)
                except RuntimeError as error:  # of cuBLAS: nothing was launched
                    self._chosen[known] = None
                    _log.warning("products of %d rows are left to %s: %s", len(x), self._first, error)
        return self._reference(x, packed, out, residual)

    def _of_class(self, known: tuple[Any, ...], x: Tensor, packed: Any, out: Tensor) -> TorchProduct | None:
        """known: number of rows, and what else a product is known by."""
        most = next((each for each in CLASSES if 0 < known[0] <= each), None)
        if most is None or most * packed.weight.shape[0] * out.element_size() > _MOST_BYTES:
            return None
        kind = (most, *known[1:])
        if kind not in self._of_classes:
            self._of_classes[kind] = self._choose(most, x, packed, out, adds=not known[-1])
        return self._of_classes[kind]

    def _choose(self, most: int, x: Tensor, packed: Any, like: Tensor, *, adds: bool) -> TorchProduct | None:
        """Measure the ways on random rows: those of a step at start may all be zero."""
        outputs, inputs = packed.weight.shape
        rows = torch.randn((most, inputs), dtype=torch.float32, device=x.device).bfloat16()
        out = like.new_empty((most, outputs))
        residual = torch.randn(out.shape, dtype=torch.float32, device=out.device).to(out.dtype) if adds else None
        found = self._ways(rows, packed, out)
        ways = {self._first: partial(self._reference, rows, packed, out, residual)}
        ways |= {name: partial(product, rows, packed, out, residual) for name, product in found.items()}
        parts = [f"up to {most} rows", f"{outputs} x {inputs}", f"{_form(packed)} to {out.dtype}"]
        parts += ["bias"] * (packed.bias is not None) + ["residual"] * adds
        key = f"product, {', '.join(parts)}".replace("torch.", "")
        return found.get(self._choices.fastest(key, ways, tolerance=self._tolerance))


def _form(packed: Any) -> str:
    """Describe how a weight is stored."""
    if isinstance(packed, Fp8Linear):
        return f"fp8 in blocks of {packed.weight.lines} x {packed.weight.group}"
    return str(packed.weight.dtype)


def ways_in_16_bits(load: Callable[[], ProductWays]) -> Ways:
    """Return those of kernels that are loaded when a product first needs them."""
    kernels = cache(load)

    def ways(x: Tensor, packed: CudaLinear, out: Tensor) -> dict[str, TorchProduct]:
        def of(product: Product) -> TorchProduct:
            return partial(with_residual, lambda x, packed, out: product(x, packed.weight, packed.bias, out))

        return {name: of(product) for name, product in kernels().ways(x, packed.weight, packed.bias, out).items()}

    return ways


def with_residual(
    product: Callable[[Tensor, Any, Tensor], None], x: Tensor, packed: Any, out: Tensor, residual: Tensor | None
) -> Tensor:
    """Compute out by a product that adds no residual, which a launch of its own then does. Returns out."""
    if residual is None:
        product(x, packed, out)
        return out
    found = torch.empty_like(out)
    product(x, packed, found)
    return torch.add(residual, found, out=out)
