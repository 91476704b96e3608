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
    and their halves.
    """

    matrices: tuple[LowBitMatrix, ...]
    offsets: Tensor

    @classmethod
    def of(cls, products: Sequence[CudaLowBit]) -> "ExpertCodes":
        """Take products of one shape. Those that are not all of one kind are copied; see `alike`."""
        parts = iter(alike([part for each in products for part in each.parts]))
        matrices = tuple(stacked([next(parts) for _ in each.parts]) for each in products)
        tensors = zip(*((each.codes, *factors_of(each)) for each in matrices), strict=True)
        return cls(matrices=matrices, offsets=torch.stack(list(map(_offsets, tensors))))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertProduct:
    """One product of E experts. matrices: [N, K] each, where they lie; of codes as LowBitMatrix has them.

    offsets: [E] int64, of each from the first one, in elements; of codes those of ExpertCodes. bias: [E, N], of
    the rows' type; None: there is none. order: [E, K] int32, the input that each column multiplies; None: columns
    are in order. stored: how 8-bit floats, or codes, stand for weights; None: weights have the type of the rows.
    """

    matrices: tuple[Tensor, ...]
    offsets: Tensor
    bias: Tensor | None = None
    order: Tensor | None = None
    stored: ExpertScaling | ExpertCodes | None = None

    @classmethod
    def of(
        cls,
        name: str,
        matrices: tuple[Tensor, ...],
        biases: tuple[Tensor, ...] | None,
        stored: ExpertScaling | None = None,
    ) -> "ExpertProduct":
        """biases: of each expert, [N]; they are copied, the matrices are not.

        Raises EngineError that names the matrix that is not like the first one.
        """
        _check_alike(name, matrices)
        return cls(matrices=matrices, offsets=_offsets(matrices), bias=maybe(torch.stack, biases), stored=stored)

    @classmethod
    def of_codes(
        cls, name: str, products: tuple[CudaLowBit, ...], biases: tuple[Tensor, ...] | None
    ) -> "ExpertProduct":
        """See `of`."""
        stored = ExpertCodes.of(products)
        matrices = tuple(each.codes for each in stored.matrices)
        _check_alike(name, matrices)
        return cls(
            matrices=matrices,
            offsets=stored.offsets,
            bias=maybe(torch.stack, biases),
            order=_orders(products),
            stored=stored,
        )

    def part(self, first: int, weights: Tensor) -> "ExpertProduct":
        """Return the product of some experts, from the first one on, with dequantised weights [experts, N, K]."""
        some = slice(first, first + len(weights))
        return ExpertProduct(
            matrices=weights.unbind(),
            offsets=torch.arange(len(weights), device=weights.device) * weights[0].numel(),
            bias=None if self.bias is None else self.bias[some],
            order=None if self.order is None else self.order[some],
        )

    def check(self, name: str, kind: torch.dtype, shape: tuple[int, int]) -> None:
        """Raise EngineError unless matrices of this shape fit rows of this type, or have scales that fit."""
        first, stored = self.matrices[0], self.stored
        if not isinstance(stored, ExpertCodes):
            expect(name, first, shape, kind if stored is None else FP8, like=first)
        elif self.shape != shape:
            raise EngineError(f"{name} has codes of {self.shape}; the kernel needs {shape}")
        expect(f"the biases of {name}", self.bias, (self.count, shape[0]), kind, like=first)
        if isinstance(stored, ExpertScaling):
            wanted = (self.count, -(-shape[0] // stored.lines), -(-shape[1] // stored.group))
            expect(f"the scales of {name}", stored.scales, wanted, torch.float32, like=first)

    @property
    def count(self) -> int:
        return len(self.matrices)

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        if isinstance(self.stored, ExpertCodes):
            return self.stored.matrices[0].num_rows, self.stored.matrices[0].width
        outputs, inputs = self.matrices[0].shape
        return outputs, inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """E equal networks. gate_up: of [2 F, H] each, gate then up; down: of [H, F] each."""

    gate_up: ExpertProduct
    down: ExpertProduct

    @classmethod
    def of(
        cls,
        gate_up: tuple[Tensor, ...],
        down: tuple[Tensor, ...],
        gate_up_biases: tuple[Tensor, ...] | None = None,
        down_biases: tuple[Tensor, ...] | None = None,
    ) -> "ExpertWeights":
        """Take weights of the rows' type; see ExpertProduct.of."""
        return cls(
            gate_up=ExpertProduct.of("gate_up", gate_up, gate_up_biases),
            down=ExpertProduct.of("down", down, down_biases),
        )

    def check(self, kind: torch.dtype, width: int) -> None:
        """Raise EngineError unless the matrices fit rows of this type and width, or have scales that fit."""
        self.gate_up.check("gate_up", kind, (2 * self.size, width))
        self.down.check("down", kind, (width, self.size))

    @property
    def first(self) -> Tensor:
        """A matrix, on the device of all."""
        return self.gate_up.matrices[0]

    @property
    def count(self) -> int:
        return self.down.count

    @property
    def width(self) -> int:
        """H: of the rows."""
        return self.down.shape[0]

    @property
    def size(self) -> int:
        """F: of the inner networks."""
        return self.down.shape[1]


def _check_alike(name: str, matrices: tuple[Tensor, ...]) -> None:
    first = matrices[0]
    for number, each in enumerate(matrices):
        expect(f"{name} of expert {number}", each, tuple(first.shape), *TYPES, FP8, torch.uint8, like=first)
        if each.data_ptr() % 16 or each.dtype is not first.dtype:
            raise EngineError(f"{name} of expert {number} is not aligned and of the type of the first one")


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
