"""Products of 8-bit floats: what a quantised weight and a quantised row are, and the arithmetic that defines them.

A matrix is quantised row by row: values in float8_e4m3fn (Micikevicius et al., arXiv:2209.05433, section 3), and
one float32 scale a row, chosen so that the row's largest magnitude becomes 448, the largest value of that type.
Weights [N, K] have their rows quantised once, activations [R, K] in every step, so nothing is calibrated and
nothing clips. The product multiplies 8-bit values, adds in float32 and scales the sum by both scales. Knows no
checkpoints, and not which products of a model are quantised.

How far off: with x' the number that stands for x in a row of scale s, |x' - x| <= max(|x| / 16, s / 1024), half a
unit in the last place of a normal and of a subnormal number. So a product is off by no more than the sum over k of
|w| dx + |x| dw + dx dw, with dx and dw these bounds; most of the time far less, for the errors have both signs.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# What a row is taken to reach at least, so that no scale is zero and no quotient overflows.
LEAST_LARGEST = 2.0**-100
_ROWS_AT_ONCE = 2048  # of a weight; bounds the float32 copies that quantising makes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Rows:
    """A matrix, row by row: row r stands for values[r] * scales[r]. One device.

    values: [R, K] float8_e4m3fn, contiguous. scales: [R] float32, contiguous.
    """

    values: Tensor
    scales: Tensor

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def dequantised(self) -> Tensor:
        """[R, K] float32."""
        return self.values.float() * self.scales[:, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Linear:
    """A product whose weight is quantised. weight: of [N, K]. bias: [N] in the activations' type."""

    weight: Fp8Rows
    bias: Tensor | None


class Fp8Products(Protocol):
    """The arithmetic on one device. Nothing waits for the device, so all of it may be recorded."""

    def check(self, weight: Fp8Rows) -> None:
        """Raises ConfigError that names the size and the limit if there is no kernel for this weight."""
        ...

    def linear(self, x: Tensor, packed: Fp8Linear, out: Tensor, residual: Tensor | None) -> Tensor:
        """Backend.linear: bias and residual are added in float32, and the result is rounded once.

        A row of x that is not finite has no finite product.
        """
        ...


class ReferenceFp8:
    """See Fp8Products. Stock operators on any device, and slow: every product widens its weight again."""

    def check(self, weight: Fp8Rows) -> None:
        """See Fp8Products. Takes any size."""

    def linear(self, x: Tensor, packed: Fp8Linear, out: Tensor, residual: Tensor | None) -> Tensor:
        rows, weight = quantise_rows(x), packed.weight
        total = rows.values.float() @ weight.values.float().t() * rows.scales[:, None] * weight.scales
        for addend in (packed.bias, residual):
            if addend is not None:
                total += addend
        return out.copy_(total)


def quantise_rows(x: Tensor) -> Fp8Rows:
    """x: [R, K], any float type. Rounds to nearest, ties to even; the definition that kernels give the bits of."""
    wide = x.float()
    largest = wide.abs().amax(-1).clamp_min(LEAST_LARGEST)
    limit = torch.full_like(largest, FP8_MAX)  # a tensor: dividing by a number may multiply by its reciprocal
    values = (wide * (limit / largest)[:, None]).to(FP8)
    return Fp8Rows(values=values, scales=largest / limit)


def quantise_weight(weight: Tensor) -> Fp8Rows:
    """quantise_rows of a weight [N, K], some rows at a time."""
    firsts = range(0, len(weight), _ROWS_AT_ONCE)
    return stack_rows([quantise_rows(weight[first : first + _ROWS_AT_ONCE]) for first in firsts])


def stack_rows(parts: list[Fp8Rows]) -> Fp8Rows:
    """One matrix of several, one below the other; each row keeps its scale."""
    codes = torch.cat([part.values.view(torch.uint8) for part in parts])  # bytes: not every device stacks FP8
    return Fp8Rows(values=codes.view(FP8), scales=torch.cat([part.scales for part in parts]))


def pack_fp8(weight: Fp8Rows, bias: Tensor | None, device: torch.device) -> Fp8Linear:
    """Copies on the device."""
    return Fp8Linear(
        weight=Fp8Rows(
            values=weight.values.to(device, copy=True).contiguous(),
            scales=weight.scales.to(device, torch.float32, copy=True).contiguous(),
        ),
        bias=None if bias is None else bias.to(device, copy=True),
    )
