"""The matrices of a mixture's networks, where they lie: in 16 bits, in 8-bit floats, or in low-bit codes.

Matrices of an expert are packed one by one; kernels find them by offsets from the first expert's, so that nothing
is copied.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from faser.errors import EngineError
from faser.kernels.cuda.low_bit import CudaLowBit, LowBitMatrix, alike, stacked
from faser.kernels.cuda.triton.common import expect
from faser.kernels.cuda.triton.grouped_fp8 import WHOLE_ROW
from faser.kernels.cuda.triton.low_bit import factors_of
from faser.kernels.interface.fp8 import FP8, Fp8Rows
from faser.optional import maybe, or_else

TYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertScaling:
    """Scales [E, outputs / lines, inputs / group] float32, rounded up, of experts in 8-bit floats; see Fp8Rows."""

    scales: Tensor
    group: int
    lines: int

    @classmethod
    def of(cls, matrices: tuple[Fp8Rows, ...]) -> "ExpertScaling":
        """Copy the scales of matrices of one shape. All have those of the smallest groups and blocks."""
        group = math.gcd(*(each.group or WHOLE_ROW for each in matrices))
        lines = min(each.lines for each in matrices)
        scales = torch.stack([each.in_groups(group).scales[::lines] for each in matrices])
        return cls(scales=scales.contiguous(), group=group, lines=lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCodes:
    """Low-bit matrices of E experts, all of one kind.

    offsets: [5, E] int64, from the first expert's, in elements: of codes, of scales and their halves, of minimums
    and their halves. order: [E, K] int32, the input that each column multiplies; None: columns are in order.
    """

    matrices: tuple[LowBitMatrix, ...]
    offsets: Tensor
    order: Tensor | None

    @classmethod
    def of(cls, products: Sequence[CudaLowBit]) -> "ExpertCodes":
        """Take products of one shape. Those that are not all of one kind are copied; see `alike`."""
        parts = iter(alike([part for each in products for part in each.parts]))
        matrices = tuple(stacked([next(parts) for _ in each.parts]) for each in products)
        tensors = zip(*((each.codes, *factors_of(each)) for each in matrices), strict=True)
        return cls(matrices=matrices, offsets=torch.stack(list(map(_offsets, tensors))), order=_orders(products))

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs of a matrix."""
        return self.matrices[0].num_rows, self.matrices[0].width


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The matrices of E equal networks, where they lie. gate_up: [2 F, H] each, gate then up; down: [H, F] each.

    gate_up_offsets, down_offsets: [E] int64, of each from the first one, in elements; of codes those of
    ExpertCodes. gate_up_bias: [E, 2 F]; down_bias: [E, H], of the rows' type; None: there are none.
    gate_up_scaling, down_scaling: of 8-bit floats, or of codes, in whose form the matrices are; None: weights have
    the type of the rows.
    """

    gate_up: tuple[Tensor, ...]
    down: tuple[Tensor, ...]
    gate_up_offsets: Tensor
    down_offsets: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate_up_scaling: ExpertScaling | ExpertCodes | None = None
    down_scaling: ExpertScaling | ExpertCodes | None = None

    @classmethod
    def of(
        cls,
        gate_up: tuple[Tensor, ...],
        down: tuple[Tensor, ...],
        gate_up_biases: tuple[Tensor, ...] | None = None,
        down_biases: tuple[Tensor, ...] | None = None,
        gate_up_scaling: ExpertScaling | ExpertCodes | None = None,
        down_scaling: ExpertScaling | ExpertCodes | None = None,
    ) -> "ExpertWeights":
        """biases: of each expert, [2 F] and [H]; they are copied, the matrices are not. scaling: of each product.

        Raises EngineError that names the matrix that is not like the first one.
        """
        for name, matrices in (("gate_up", gate_up), ("down", down)):
            first = matrices[0]
            for number, each in enumerate(matrices):
                expect(
                    f"{name} of expert {number}", each, tuple(first.shape), *TYPES, FP8, torch.uint8, like=first
                )
                if each.data_ptr() % 16 or each.dtype is not first.dtype:
                    raise EngineError(f"{name} of expert {number} is not aligned and of the type of the first one")
        return cls(
            gate_up=gate_up,
            down=down,
            gate_up_offsets=_offsets_of(gate_up, gate_up_scaling),
            down_offsets=_offsets_of(down, down_scaling),
            gate_up_bias=maybe(torch.stack, gate_up_biases),
            down_bias=maybe(torch.stack, down_biases),
            gate_up_scaling=gate_up_scaling,
            down_scaling=down_scaling,
        )

    def check(self, kind: torch.dtype, width: int) -> None:
        """Raise EngineError unless the matrices fit rows of this type and width, or have scales that fit."""
        first, size = self.gate_up[0], self.size
        for name, matrix, shape, scaling, bias in (
            ("gate_up", first, (2 * size, width), self.gate_up_scaling, self.gate_up_bias),
            ("down", self.down[0], (width, size), self.down_scaling, self.down_bias),
        ):
            expect(f"the biases of {name}", bias, (self.count, shape[0]), kind, like=first)
            if isinstance(scaling, ExpertCodes):
                if scaling.shape != shape:
                    raise EngineError(f"{name} has codes of {scaling.shape}; the kernel needs {shape}")
                continue
            expect(name, matrix, shape, kind if scaling is None else FP8, like=first)
            if scaling is not None:
                wanted = (self.count, -(-shape[0] // scaling.lines), -(-shape[1] // scaling.group))
                expect(f"the scales of {name}", scaling.scales, wanted, torch.float32, like=first)

    @property
    def count(self) -> int:
        return len(self.down)

    @property
    def size(self) -> int:
        """F: of the inner networks."""
        scaling = self.down_scaling
        return scaling.shape[1] if isinstance(scaling, ExpertCodes) else self.down[0].shape[1]


def _offsets_of(matrices: tuple[Tensor, ...], scaling: ExpertScaling | ExpertCodes | None) -> Tensor:
    return scaling.offsets if isinstance(scaling, ExpertCodes) else _offsets(matrices)


def _offsets(matrices: Sequence[Tensor]) -> Tensor:
    first = matrices[0]
    found = [(each.data_ptr() - first.data_ptr()) // first.element_size() for each in matrices]
    return torch.tensor(found, dtype=torch.int64).to(first.device)


def _orders(products: Sequence[CudaLowBit]) -> Tensor | None:
    """Return the inputs of all columns of all products, [E, K] int32; None: all are in order."""
    if all(each.order is None for each in products):
        return None
    first = products[0]
    in_order = torch.arange(first.shape[1], device=first.parts[0].codes.device)
    return torch.stack([or_else(each.order, in_order) for each in products]).int()
