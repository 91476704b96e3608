"""Mixtures of experts of few rows, norms included: in three launches where that was measured to be faster.

A mixture's ways are measured when a shape is first computed with so many rows, which is before graphs are
captured. The separate launches, which serve all numbers of rows, are the reference. See triton/few_row_experts.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from faser.kernels.cuda.choices import Choices
from faser.kernels.cuda.flashinfer.device_kernels import RunFewRowExperts
from faser.kernels.cuda.low_bit import CudaLowBit
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.blocks import BlockBuffers, Experts
from faser.kernels.interface.forward import SeparateMixtures
from faser.kernels.interface.fp8 import Fp8Linear
from faser.kernels.interface.shapes import PackedLinear

MOST_ROWS = 8
SEPARATE = "separate launches"
_TOLERANCE = 2.0**-5

Ways = Mapping[str, RunFewRowExperts]


class FewRowMixtures(SeparateMixtures):
    """Mixtures of up to MOST_ROWS rows; those of more rows are computed in separate launches.

    ways: to compute a mixture in fewer launches, by name; none where it has no kernels for them. counter: see
    FlashInferBackend.expert_counter.
    """

    def __init__(
        self, backend: Backend, ways: Callable[[Experts], Ways], counter: Callable[[], Tensor], choices: Choices
    ) -> None:
        super().__init__(backend)
        self._ways, self._counter, self._choices = ways, counter, choices
        self._found: WeakKeyDictionary[Experts, Ways] = WeakKeyDictionary()
        # By the number of rows; None: separate launches.
        self._chosen: WeakKeyDictionary[Experts, dict[int, RunFewRowExperts | None]] = WeakKeyDictionary()

    def add(
        self,
        hidden: Tensor,
        norm: Tensor,
        eps: float,
        block: Experts,
        into: Tensor,
        buffers: BlockBuffers,
        *,
        router_norm: Tensor | None = None,
    ) -> None:
        run, rows = None, len(hidden)
        if 0 < rows <= MOST_ROWS:
            chosen = self._chosen.setdefault(block, {})
            if rows not in chosen:
                chosen[rows] = self._choose(hidden, norm, eps, block, buffers, router_norm)
            run = chosen[rows]
        if run is None:
            super().add(hidden, norm, eps, block, into, buffers, router_norm=router_norm)
        else:
            run(hidden, norm, eps, into, self._counter(), buffers.slots, router_norm)

    def _choose(
        self,
        hidden: Tensor,
        norm: Tensor,
        eps: float,
        block: Experts,
        buffers: BlockBuffers,
        router_norm: Tensor | None,
    ) -> RunFewRowExperts | None:
        """Measure the ways on random rows: those of a step at start may all be equal, or padding."""
        ways = self._found.get(block)
        if ways is None:
            ways = self._found[block] = self._ways(block)
        generator = torch.Generator(hidden.device).manual_seed(0)
        rows = torch.randn(hidden.shape, generator=generator, device=hidden.device).to(hidden.dtype)
        slots = None if buffers.slots is None else torch.zeros_like(buffers.slots)
        room, counter = replace(buffers, slots=slots), self._counter()
        before = counter.clone()

        def separate() -> Tensor:
            into = torch.zeros_like(rows)
            super(FewRowMixtures, self).add(rows, norm, eps, block, into, room, router_norm=router_norm)
            return into

        def fewer(run: RunFewRowExperts) -> Tensor:
            into = torch.zeros_like(rows)
            run(rows, norm, eps, into, counter, slots, router_norm)
            return into

        by_name = {SEPARATE: separate} | {name: (lambda run=run: fewer(run)) for name, run in ways.items()}
        name = self._choices.fastest(_key(rows, block, router_norm), by_name, tolerance=_TOLERANCE)
        counter.copy_(before)
        return ways.get(name)


def _key(rows: Tensor, block: Experts, router_norm: Tensor | None) -> str:
    count, width = rows.shape
    first = block.gate_up[0]
    parts = [f"mixture of {len(block.gate_up)}", f"{count} rows", f"{width} x {first.shape[0] // 2}"]
    parts += filter(None, dict.fromkeys(map(_form, (first, block.down[0]))))
    parts += [f"{block.top_k} each", str(rows.dtype).removeprefix("torch."), block.activation]
    parts += ["renormalised"] * block.renormalise + ["a shared one"] * (block.shared is not None)
    parts += ["biases"] * (first.bias is not None) + ["scales"] * (block.scales is not None)
    parts += ["a norm of the router's"] * (router_norm is not None)
    return ", ".join(parts)


def _form(packed: PackedLinear) -> str:
    """Describe how a weight is stored; "": in 16 bits."""
    if isinstance(packed, CudaLowBit):
        return " and ".join(str(each.kind).replace("torch.", "") for each in packed.parts)
    return "in 8 bits" if isinstance(packed, Fp8Linear) else ""
