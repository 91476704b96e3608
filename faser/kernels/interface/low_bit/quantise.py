"""How weights in 16 or 32 bits become integers with scales, bit for bit.

int8: one scale for 32 values of a row, their largest magnitude over 127.
int4: one scale and one minimum for each group, the pair of _STEPS that misses its values least (sum of squares):
a first guess of the codes gives the line through the values by least squares, whose slope and height become half
floats; the codes are those nearest to the values on that line. A search of this kind is that of llama.cpp's K
formats (ggml-quants.c, make_qkx2_quants), with weights of one.

Every operation is in float32 and rounded on its own, and sums are in the order of the values, so that the native
kernel gives these bits.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from faser.kernels.interface.low_bit.formats import Bytes, DecodedRows, Floats, MemoryForm
from faser.kernels.interface.low_bit.group_rows import GroupRows

_STEPS = tuple(np.float32(11 + step / 2) for step in range(13))  # codes that a group's values span at first
_SMALLEST_SPAN = np.float32(2.0**-100)  # of a group whose values differ; so that no quotient overflows


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How weights are rounded. group_size: values of a row with one scale."""

    name: str
    bits: int
    group_size: int
    zero_point: int
    has_minimums: bool

    @property
    def form(self) -> MemoryForm:
        return MemoryForm.NIBBLES if self.bits == 4 else MemoryForm.BYTES


INT8 = Scheme(name="int8", bits=8, group_size=32, zero_point=128, has_minimums=False)
INT4 = Scheme(name="int4", bits=4, group_size=32, zero_point=0, has_minimums=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatRows:
    """Rows that are quantised when they are packed. weight: [N, K] of floats within ±2 ** 15, not written to."""

    weight: Tensor
    scheme: Scheme

    @property
    def num_rows(self) -> int:
        return len(self.weight)

    @property
    def depth(self) -> int:
        return int(self.weight.shape[1])

    @property
    def num_bytes(self) -> int:
        """Of codes, scales and minimums, packed."""
        factors = self.num_rows * -(-self.depth // self.scheme.group_size) * (1 + self.scheme.has_minimums)
        return self.weight.numel() * self.scheme.bits // 8 + 2 * factors

    def decode(self) -> DecodedRows:
        return quantise(self.weight.float().cpu().numpy(), self.scheme).decode()


def quantise(weight: Floats, scheme: Scheme) -> GroupRows:
    """weight: [N, K], K a multiple of 32. The last group of a row may have fewer values than the others."""
    rows, depth = weight.shape
    size = scheme.group_size
    whole = depth // size * size
    parts = [weight[:, :whole].reshape(-1, size)] if whole else []
    if depth > whole:
        parts.append(weight[:, whole:])
    found = [_int8(part) if scheme is INT8 else _int4(part) for part in parts]
    widths = [whole // size, 1] if whole else [1]
    codes = [each.reshape(rows, -1) for each, _, _ in found]
    scales = [each.reshape(rows, width) for (_, each, _), width in zip(found, widths, strict=False)]
    minimums = [each.reshape(rows, width) for (_, _, each), width in zip(found, widths, strict=False)]
    return GroupRows(
        codes=np.concatenate(codes, 1),
        bits=scheme.bits,
        zero_point=scheme.zero_point,
        group_size=size,
        scales=np.concatenate(scales, 1),
        minimums=np.concatenate(minimums, 1) if scheme.has_minimums else None,
    )


Fit = tuple[Bytes, Floats, Floats]


def _int8(groups: Floats) -> Fit:
    """groups: [G, values]. Codes, scales [G], and no minimums."""
    scales = _half(np.abs(groups).max(1) / np.float32(127))
    codes = np.rint(groups * _inverse(scales)[:, None]).clip(-127, 127) + 128
    return codes.astype(np.uint8), scales, np.zeros_like(scales)


def _int4(groups: Floats) -> Fit:
    """groups: [G, values]. Codes, scales and minimums [G]."""
    values = np.ascontiguousarray(groups.T)  # [values, G]: sums run over the values
    count = np.float32(len(values))
    low, high = values.min(0), values.max(0)
    span = high - low
    total = _sum(values)
    best, scales, minimums = np.full_like(low, np.inf), np.zeros_like(low), np.zeros_like(low)
    for steps in _STEPS:
        flat = span < _SMALLEST_SPAN
        inverse = np.where(flat, np.float32(0), steps / np.where(flat, np.float32(1), span))
        codes = np.rint((values - low) * inverse).clip(0, 15)
        sum_of_codes, sum_of_squares = _sum(codes), _sum(codes * codes)
        spread = count * sum_of_squares - sum_of_codes * sum_of_codes
        slope = (count * _sum(values * codes) - sum_of_codes * total) / np.maximum(spread, np.float32(1))
        scale = _half(slope)
        minimum = _half((total - scale * sum_of_codes) / count)
        misses = scale * _codes(values, scale, minimum) + minimum - values
        error = _sum(misses * misses)
        better = error < best
        best, scales = np.where(better, error, best), np.where(better, scale, scales)
        minimums = np.where(better, minimum, minimums)
    return _codes(values, scales, minimums).T.astype(np.uint8), scales, minimums


def _codes(values: Floats, scales: Floats, minimums: Floats) -> Floats:
    codes: Floats = np.rint((values - minimums) * _inverse(scales)).clip(0, 15)
    return codes


def _inverse(scales: Floats) -> Floats:
    """1 / scale; 0 where that is 0."""
    none = scales == 0
    return np.where(none, np.float32(0), np.float32(1) / np.where(none, np.float32(1), scales))


def _sum(values: Floats) -> Floats:
    """[G] of [values, G], one after the other."""
    total: Floats = np.zeros_like(values[0])
    for each in values:
        total += each
    return total


def _half(values: npt.NDArray[np.floating[Any]]) -> Floats:
    return values.astype(np.float16).astype(np.float32)
