"""Products of 8-bit floats: quantised weights and rows, and the arithmetic that defines them.

A matrix is quantised row by row: values in float8_e4m3fn (Micikevicius et al., arXiv:2209.05433, section 3), and
one float32 scale per row, chosen so that the row's largest magnitude becomes 448, the largest value of that type.
The rows of a weight [N, K] are quantised once, those of activations [R, K] in every step, so nothing is calibrated
and nothing clips. The product multiplies 8-bit values, adds in float32 and scales the sum by both scales. Knows
neither checkpoints nor which products of a model are quantised.

Weights of published checkpoints may have a scale for each group of columns of a row, mostly one for 128 x 128
values. The product then quantises the rows of activations by the same groups (DeepSeek-V3, arXiv:2412.19437,
section 3.3.2). A product that leaves them in 16 bits is nearer to that of the weights.

The error: with x' the number that stands for x in a row of scale s, |x' - x| <= max(|x| / 16, s / 1024), half a
unit in the last place of a normal and of a subnormal number. So a product is off by no more than the sum over k of
|w| dx + |x| dw + dx dw, with dx and dw these bounds; mostly by far less, since the errors have both signs.
"""

import math
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from faser.kernels.interface.blocks import Blocks

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# The least largest magnitude of a row, so that no scale is zero and no quotient overflows.
LEAST_LARGEST = 2.0**-100
_MOST_LINES = 128  # rows that share the scales of a packed weight
_ROWS_AT_ONCE = 2048  # of a weight; bounds the float32 copies that quantising makes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Rows:
    """A quantised matrix. All tensors are on one device.

    values: [R, K] float8_e4m3fn, contiguous. scales: float32, contiguous: [R], one for each row; or with a
    group [ceil(R / lines), ceil(K / group)], one for `group` columns of `lines` rows. Only packed weights have
    more lines than one.
    """

    values: Tensor
    scales: Tensor
    group: int | None = None
    lines: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def take_columns(self, first: int, last: int) -> "Fp8Rows":
        """Columns first … last - 1. A group that an end cuts is divided into smaller ones with the same scale."""
        codes = self.values.view(torch.uint8)[:, first:last].contiguous()
        if self.group is None:
            return replace(self, values=codes.view(FP8))
        size = math.gcd(self.group, first)
        scales = self._scales_by(size)[:, first // size : -(-last // size)].contiguous()
        return replace(self, values=codes.view(FP8), scales=scales, group=size)

    def take(self, rows: NDArray[np.int64]) -> "Fp8Rows":
        """These rows, in this order, of a matrix that is not packed."""
        assert self.lines == 1, "packed scales are those of blocks"
        order = torch.from_numpy(rows)
        values = self.values.view(torch.uint8)[order].view(FP8)
        return replace(self, values=values, scales=self.scales[order])

    def part(self, first: int, last: int) -> "Fp8Rows":
        """Rows first … last - 1, without a copy. A first row of packed ones begins a block."""
        assert first % self.lines == 0, (first, self.lines)
        scales = self.scales[first // self.lines : -(-last // self.lines)]
        return replace(self, values=self.values[first:last], scales=scales)

    def in_groups(self, size: int) -> "Fp8Rows":
        """Return the same numbers, unpacked, with a scale for each `size` columns, a divisor of the group's."""
        return replace(self, scales=self._scales_by(size), group=size, lines=1)

    def packed(self) -> "Fp8Rows":
        """Return the same numbers with one scale for as many rows as have the same ones, up to _MOST_LINES."""
        if self.group is None or self.lines > 1:
            return self
        lines = _MOST_LINES
        while lines > 1 and not self._share(lines):
            lines //= 2
        return replace(self, scales=self.scales[::lines].contiguous(), lines=lines)

    def dequantised(self) -> Tensor:
        """Return the rows as [R, K] float32."""
        if self.group is None:
            return self.values.float() * self.scales[:, None]
        scales = self.in_groups(self.group).scales.repeat_interleave(self.group, 1)
        return self.values.float() * scales[:, : self.values.shape[1]]

    def _share(self, lines: int) -> bool:
        count = len(self.scales)
        return torch.equal(self.scales[::lines].repeat_interleave(lines, 0)[:count], self.scales)

    def _scales_by(self, size: int) -> Tensor:
        """Return scales [R, ceil(K / size)], of groups of this size."""
        rows, width = self.values.shape
        if self.group is None:
            return self.scales[:, None].expand(rows, -(-width // size)).contiguous()
        scales = self.scales.repeat_interleave(self.lines, 0)[:rows]
        return scales.repeat_interleave(self.group // size, 1)[:, : -(-width // size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Linear:
    """A product with a quantised weight [N, K]. bias: [N] in the dtype of the activations."""

    weight: Fp8Rows
    bias: Tensor | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def by_row(self) -> bool:
        """Return whether each row of the weight has one scale."""
        return self.weight.group is None


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
        weight = packed.weight
        rows = quantise_rows(x, weight.group)
        if weight.group is None:
            total = rows.values.float() @ weight.values.float().t() * rows.scales[:, None] * weight.scales
        else:
            total = rows.dequantised() @ weight.dequantised().t()
        for addend in (packed.bias, residual):
            if addend is not None:
                total += addend
        return out.copy_(total)


def quantise_rows(x: Tensor, group: int | None = None) -> Fp8Rows:
    """Quantise x [R, K], any float type, to the nearest values, ties to even. Kernels must give the same bits.

    group: columns that share a scale; None: those of a row do.
    """
    wide, width = x.float(), x.shape[1]
    if group is not None:
        parts = functional.pad(wide, (0, -width % group)).view(-1, group)
        found = quantise_rows(parts)
        values = found.values.view(torch.uint8).view(len(x), -1)[:, :width].contiguous().view(FP8)
        return Fp8Rows(values=values, scales=found.scales.view(len(x), -1), group=group)
    largest = wide.abs().amax(-1).clamp_min(LEAST_LARGEST)
    limit = torch.full_like(largest, FP8_MAX)  # a tensor: dividing by a number may multiply by its reciprocal
    values = (wide * (limit / largest)[:, None]).to(FP8)
    return Fp8Rows(values=values, scales=largest / limit)


def quantise_weight(weight: Tensor) -> Fp8Rows:
    """quantise_rows of a weight [N, K], a part of the rows at a time."""
    firsts = range(0, len(weight), _ROWS_AT_ONCE)
    return stack_rows([quantise_rows(weight[first : first + _ROWS_AT_ONCE]) for first in firsts])


def stack_rows(parts: list[Fp8Rows]) -> Fp8Rows:
    """Concatenate matrices along their rows; each keeps its scales, in groups that divide those of all."""
    codes = torch.cat([part.values.view(torch.uint8) for part in parts])  # not every device concatenates float8
    group = math.gcd(*(part.group or 0 for part in parts)) or None  # a row's group is a multiple of any
    grouped = parts if group is None else [part.in_groups(group) for part in parts]
    return Fp8Rows(values=codes.view(FP8), scales=torch.cat([part.scales for part in grouped]), group=group)


def pack_fp8(weight: Fp8Rows, bias: Tensor | None, device: torch.device) -> Fp8Linear:
    """Copy a quantised product to the device."""
    packed = weight.packed()
    return Fp8Linear(
        weight=replace(
            packed,
            values=packed.values.to(device, copy=True).contiguous(),
            scales=packed.scales.to(device, torch.float32, copy=True).contiguous(),
        ),
        bias=None if bias is None else bias.to(device, copy=True),
    )
