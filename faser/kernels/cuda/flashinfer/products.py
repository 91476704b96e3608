"""Products in 16 bits by the fastest kernel: torch's, or one of FlashInfer's (product_kernels.py).

Numbers of rows fall into classes. When a shape of product is first needed in a class, before graphs are captured,
its ways are measured with the most rows of the class, and the fastest one serves the class. Products with more
rows, of prompts, stay torch's: cuBLAS is near the limit there.

A product by FlashInfer adds no residual; a launch of its own does, and is measured with it.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from faser.kernels.cuda.choices import Choices
from faser.kernels.cuda.device import is_carved_out
from faser.kernels.cuda.flashinfer.device_kernels import CudaLinear
from faser.kernels.cuda.flashinfer.product_kernels import Product

CLASSES = (8, 16, 32, 64, 128, 256, 512)  # most rows of each
_TORCH = "torch"
_TOLERANCE = 2.0**-6  # of the largest value: roundings of bfloat16
_MOST_BYTES = 64 << 20  # of a result: measuring holds several, and at start memory is nearly full

_log = logging.getLogger("faser")

TorchProduct = Callable[[Tensor, CudaLinear, Tensor, Tensor | None], Tensor]  # see FlashInferBackend.linear


class ProductWays(Protocol):
    """Ways to compute a product, by name."""

    def ways(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> dict[str, Product]: ...


class Products:
    """Products of one backend. by_torch: the reference."""

    def __init__(self, kernels: Callable[[], ProductWays], by_torch: TorchProduct, choices: Choices) -> None:
        self._load = kernels
        self._kernels: ProductWays | None = None
        self._by_torch, self._choices = by_torch, choices
        # By number of rows and by class; None: torch's.
        self._chosen: dict[tuple[Any, ...], Product | None] = {}
        self._of_classes: dict[tuple[Any, ...], Product | None] = {}

    def linear(self, x: Tensor, packed: CudaLinear, out: Tensor, residual: Tensor | None) -> Tensor:
        """See FlashInferBackend.linear."""
        known = (len(x), packed.weight.shape, packed.bias is None, out.dtype, residual is None)
        # Kernels were measured on all processors; torch's are cut for the fewer of a lane.
        takes = x.dtype is torch.bfloat16 and x.is_contiguous() and out.is_contiguous()
        if takes and not is_carved_out():
            if known not in self._chosen:
                self._chosen[known] = self._of_class(known, packed, out)
            product = self._chosen[known]
            if product is not None:
                try:
                    return _with_residual(product, x, packed, out, residual)
                except RuntimeError as error:  # of cuBLAS: nothing was launched
                    self._chosen[known] = None
                    _log.warning("products of %d rows are left to torch: %s", len(x), error)
        return self._by_torch(x, packed, out, residual)

    def _of_class(self, known: tuple[Any, ...], packed: CudaLinear, out: Tensor) -> Product | None:
        """known: number of rows, and what else a product is known by."""
        most = next((each for each in CLASSES if 0 < known[0] <= each), None)
        if most is None or most * len(packed.weight) * out.element_size() > _MOST_BYTES:
            return None
        kind = (most, *known[1:])
        if kind not in self._of_classes:
            self._of_classes[kind] = self._choose(most, packed, out, adds=not known[-1])
        return self._of_classes[kind]

    def _choose(self, most: int, packed: CudaLinear, like: Tensor, *, adds: bool) -> Product | None:
        """Measure the ways on random rows: those of a step at start may all be zero."""
        weight, bias = packed.weight, packed.bias
        rows = torch.randn((most, weight.shape[1]), dtype=torch.float32, device=weight.device).bfloat16()
        out = like.new_empty((most, len(weight)))
        residual = torch.randn(out.shape, dtype=torch.float32, device=out.device).to(out.dtype) if adds else None
        if self._kernels is None:
            self._kernels = self._load()
        found = self._kernels.ways(rows, weight, bias, out)
        ways = {_TORCH: partial(self._by_torch, rows, packed, out, residual)}
        ways |= {
            name: partial(_with_residual, product, rows, packed, out, residual) for name, product in found.items()
        }
        parts = [f"up to {most} rows", f"{len(weight)} x {weight.shape[1]}", f"{weight.dtype} to {out.dtype}"]
        parts += ["bias"] * (bias is not None) + ["residual"] * adds
        key = f"product, {', '.join(parts)}".replace("torch.", "")
        return found.get(self._choices.fastest(key, ways, tolerance=_TOLERANCE))


def _with_residual(
    product: Product, x: Tensor, packed: CudaLinear, out: Tensor, residual: Tensor | None
) -> Tensor:
    if residual is None:
        product(x, packed.weight, packed.bias, out)
        return out
    found = torch.empty_like(out)
    product(x, packed.weight, packed.bias, found)
    return torch.add(residual, found, out=out)
