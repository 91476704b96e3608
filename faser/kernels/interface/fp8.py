"""Products of 8-bit floats: quantised weights and rows, and the arithmetic that defines them.

A matrix is quantised row by row: values in float8_e4m3fn (Micikevicius et al., arXiv:2209.05433, section 3), and
one float32 scale per row, chosen so that the row's largest magnitude becomes 448, the largest value of that type.
The rows of a weight [N, K] are quantised once, those of activations [R, K] in every step, so nothing is calibrated
and nothing clips. The product multiplies 8-bit values, adds in float32 and scales the sum by both scales. Knows
neither checkpoints nor which products of a model are quantised.

The error: with x' the number that stands for x in a row of scale s, |x' - x| <= max(|x| / 16, s / 1024), half a
unit in the last place of a normal and of a subnormal number. So a product is off by no more than the sum over k of
|w| dx + |x| dw + dx dw, with dx and dw these bounds; mostly by far less, since the errors have both signs.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.kernels.interface.blocks import Blocks

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# The least largest magnitude of a row, so that no scale is zero and no quotient overflows.
LEAST_LARGEST = 2.0**-100
_ROWS_AT_ONCE = 2048  # of a weight; bounds the float32 copies that quantising makes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Rows:
    """A quantised matrix: row r stands for values[r] * scales[r]. Both tensors are on one device.

    values: [R, K] float8_e4m3fn, contiguous. scales: [R] float32, contiguous.
    """

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def take_columns(self, first: int, last: int) -> "Fp8Rows":
        """Columns first … last - 1; each row keeps its scale."""
        codes = self.values.view(torch.uint8)[:, first:last].contiguous()
        return Fp8Rows(values=codes.view(FP8), scales=self.scales)

    def take(self, rows: NDArray[np.int64]) -> "Fp8Rows":
        """These rows, in this order."""
        order = torch.from_numpy(rows)
        values = self.values.view(torch.uint8)[order].view(FP8)
        return Fp8Rows(values=values, scales=self.scales[order])

    def dequantised(self) -> Tensor:
        """Return the rows as [R, K] float32."""
        return self.values.float() * self.scales[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Linear:
    """A product with a quantised weight [N, K]. bias: [N] in the dtype of the activations."""

    weight: Fp8Rows
    bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnscaledProduct:
    """A quantised product before its scales. sums: [R, N]; row_scales: [R]; column_scales: [N]; all float32.

    bias: [N] in the dtype of the activations.
    """

    sums: Tensor
    row_scales: Tensor
    column_scales: Tensor
    bias: Tensor | None


class Fp8Products(Protocol):
    """Quantised products on one device. No method waits for the device, so CUDA graphs can capture them."""

    def check(self, weight: Fp8Rows) -> None:
        """Raises ConfigError that names the size and the limit if this weight has no kernel."""
        ...

    def blocks(self, separate: Blocks) -> Blocks:
        """Units of a layer with these products. separate: computes the units that have others."""
        ...

    def linear(self, x: Tensor, packed: Fp8Linear, out: Tensor, residual: Tensor | None) -> Tensor:
        """See Backend.linear. Adds bias and residual in float32 and rounds the result once.

        A row of x with an infinity or a NaN gets no finite product.
        """
        ...


class ReferenceFp8:
    """Products of 8-bit floats by torch operators on any device; slow: every product widens its weight again."""

    def check(self, weight: Fp8Rows) -> None:
        """Every size has a kernel."""

    def blocks(self, separate: Blocks) -> Blocks:
        return separate

    def linear(self, x: Tensor, packed: Fp8Linear, out: Tensor, residual: Tensor | None) -> Tensor:
        rows, weight = quantise_rows(x), packed.weight
        total = rows.values.float() @ weight.values.float().t() * rows.scales[:, None] * weight.scales
        for addend in (packed.bias, residual):
            if addend is not None:
                total += addend
        return out.copy_(total)


def quantise_rows(x: Tensor) -> Fp8Rows:
    """Quantise x [R, K], any float type, to the nearest values, ties to even. Kernels must give the same bits."""
    wide = x.float()
    largest = wide.abs().amax(-1).clamp_min(LEAST_LARGEST)
    limit = torch.full_like(largest, FP8_MAX)  # a tensor: dividing by a number may multiply by its reciprocal
    values = (wide * (limit / largest)[:, None]).to(FP8)
    return Fp8Rows(values=values, scales=largest / limit)


def quantise_weight(weight: Tensor) -> Fp8Rows:
    """quantise_rows of a weight [N, K], a part of the rows at a time."""
    firsts = range(0, len(weight), _ROWS_AT_ONCE)
    return stack_rows([quantise_rows(weight[first : first + _ROWS_AT_ONCE]) for first in firsts])


def stack_rows(parts: list[Fp8Rows]) -> Fp8Rows:
    """Concatenate matrices along their rows; each row keeps its scale."""
    codes = torch.cat([part.values.view(torch.uint8) for part in parts])  # not every device concatenates float8
    return Fp8Rows(values=codes.view(FP8), scales=torch.cat([part.scales for part in parts]))


def pack_fp8(weight: Fp8Rows, bias: Tensor | None, device: torch.device) -> Fp8Linear:
    """Copy a quantised product to the device."""
    return Fp8Linear(
        weight=Fp8Rows(
            values=weight.values.to(device, copy=True).contiguous(),
            scales=weight.scales.to(device, torch.float32, copy=True).contiguous(),
        ),
        bias=None if bias is None else bias.to(device, copy=True),
    )
