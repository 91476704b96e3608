"""LowBitRows: a low-bit weight, made of parts that each hold their rows in their own way.

    BlockRows   the blocks of a GGUF file (formats.py)
    GroupRows   integers with a scale, and perhaps a minimum, for every group of consecutive values
    FloatRows   floats, which become GroupRows when they are packed

Floats are rounded in one of two schemes, bit for bit:

int8: one scale for 32 values of a row, their largest magnitude over 127.
int4: one scale and one minimum for each group, the pair of STEPS that misses its values least (sum of squares):
a first guess of the codes gives the line through the values by least squares, whose slope and height become half
floats; the codes are those nearest to the values on that line. A search of this kind is that of llama.cpp's K
formats (ggml-quants.c, make_qkx2_quants), with weights of one.

Every operation is in float32 and rounded on its own, and sums are in the order of the values, so that the native
kernel gives these bits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from faser.errors import ConfigError
from faser.kernels.interface.low_bit.formats import FORMATS, BlockFormat, DecodedRows, GroupFactors, MemoryForm
from faser.types.arrays import Bytes, Floats32

MULTIPLIED = 32  # values that one integer sum of a product covers
SPAN = 256  # values that a scale in memory covers at most
_BITS = (4, 8)
STEPS = tuple(np.float32(11 + step / 2) for step in range(13))  # codes that a group's values span at first
SMALLEST_SPAN = np.float32(2.0**-100)  # of a group whose values differ; so that no quotient overflows


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Scheme by which weights are rounded. group_size: values of a row with one scale."""

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
class GroupRows:
    """Rows whose weights stand for (code - zero_point) * scale + minimum. Build it with group_rows.

    codes: [N, K] uint8, below 2 ** bits. scales: [N, K / group_size rounded up], of any float32 numbers. minimums:
    the same, or None.
    """

    codes: Bytes
    bits: int
    zero_point: int
    group_size: int
    scales: Floats32
    minimums: Floats32 | None

    @property
    def num_rows(self) -> int:
        return len(self.codes)

    @property
    def depth(self) -> int:
        """K: values of a row."""
        return int(self.codes.shape[1])

    @property
    def form(self) -> MemoryForm:
        return MemoryForm.NIBBLES if self.bits == 4 else MemoryForm.BYTES

    @property
    def has_half_factors(self) -> bool:
        """Return whether half floats hold every scale and minimum without rounding."""
        return all(_is_half(factors) for factors in (self.scales, self.minimums) if factors is not None)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of codes, scales and minimums, packed."""
        factors = self.scales.size + (0 if self.minimums is None else self.minimums.size)
        return self.codes.size * self.bits // 8 + factors * (2 if self.has_half_factors else 4)

    def take(self, rows: npt.NDArray[np.int64]) -> "GroupRows":
        minimums = None if self.minimums is None else self.minimums[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], minimums=minimums)

    def take_columns(self, first: int, last: int) -> "GroupRows":
        groups = _whole_blocks(first, last, self.depth, self.group_size)
        return replace(
            self,
            codes=np.ascontiguousarray(self.codes[:, first:last]),
            scales=np.ascontiguousarray(self.scales[:, groups]),
            minimums=None if self.minimums is None else np.ascontiguousarray(self.minimums[:, groups]),
        )

    def decode(self) -> DecodedRows:
        """In groups of 32: what products compute with."""

        def spread(factors: Floats32) -> GroupFactors:
            values = factors.repeat(self.group_size // MULTIPLIED, 1)[:, : self.depth // MULTIPLIED]
            return GroupFactors(values=values)

        return DecodedRows(
            codes=self.codes,
            zero_point=self.zero_point,
            scales=spread(self.scales),
            minimums=None if self.minimums is None else spread(self.minimums),
        )


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
        """Return the bytes of codes, scales and minimums, packed."""
        factors = self.num_rows * -(-self.depth // self.scheme.group_size) * (1 + self.scheme.has_minimums)
        return self.weight.numel() * self.scheme.bits // 8 + 2 * factors

    def take(self, rows: npt.NDArray[np.int64]) -> "FloatRows":
        return replace(self, weight=self.weight[torch.from_numpy(rows)])

    def take_columns(self, first: int, last: int) -> "FloatRows":
        _whole_blocks(first, last, self.depth, self.scheme.group_size)
        return replace(self, weight=self.weight[:, first:last])

    def decode(self) -> DecodedRows:
        return quantise(self.weight.float().cpu().numpy(), self.scheme).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRows:
    """Rows of a weight in one format. blocks: [N, bytes of a row], contiguous; perhaps a part of a mapped file."""

    format: BlockFormat
    blocks: Bytes

    @property
    def num_rows(self) -> int:
        return len(self.blocks)

    @property
    def depth(self) -> int:
        """K: values of a row."""
        return int(self.blocks.shape[1]) // self.format.num_bytes * self.format.values

    @property
    def num_bytes(self) -> int:
        return self.blocks.nbytes

    def take(self, rows: npt.NDArray[np.int64]) -> "BlockRows":
        return replace(self, blocks=self.blocks[rows])

    def take_columns(self, first: int, last: int) -> "BlockRows":
        blocks, size = _whole_blocks(first, last, self.depth, self.format.values), self.format.num_bytes
        columns = self.blocks[:, blocks.start * size : blocks.stop * size]
        return replace(self, blocks=np.ascontiguousarray(columns))

    def decode(self) -> DecodedRows:
        return self.format.decode(self.blocks)


LowBitPart = BlockRows | GroupRows | FloatRows


@dataclass(frozen=True, slots=True, kw_only=True)
class LowBitRows:
    """A weight [N, K]: the rows of its parts follow one another.

    order: [K], the input that each column of the parts multiplies; None: the k-th column multiplies input k.
    """

    parts: tuple[LowBitPart, ...]
    order: npt.NDArray[np.int32] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.num_rows for part in self.parts), self.parts[0].depth

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def take(self, rows: npt.NDArray[np.int64]) -> "LowBitRows":
        """These rows, in this order, of a weight of one part."""
        (part,) = self.parts
        return replace(self, parts=(part.take(rows),))

    def take_columns(self, first: int, last: int) -> "LowBitRows":
        """Inputs first … last - 1. Raises ConfigError for ends within a block, and for inputs in another order."""
        if self.order is not None:
            raise ConfigError("its columns are not in the order of its inputs, so they cannot be divided")
        return replace(self, parts=tuple(part.take_columns(first, last) for part in self.parts))

    def dequantised(self) -> Floats32:
        """Return the weights [N, K], columns in the order of the inputs."""
        columns = np.concatenate([part.decode().dequantised() for part in self.parts])
        return columns if self.order is None else columns[:, np.argsort(self.order)]


def block_rows(format_name: str, blocks: Bytes, depth: int) -> LowBitRows:
    """A weight [N, depth] in one format. blocks: [N, bytes of a row].

    Raises ConfigError that names an unknown format, or a depth and a row that do not belong together.
    """
    found = FORMATS.get(format_name)
    if found is None:
        raise ConfigError(f"the format is {format_name}; low-bit weights are {', '.join(FORMATS)}")
    if depth % found.values or blocks.shape[1] != depth // found.values * found.num_bytes:
        raise ConfigError(
            f"a row of {depth} values in {format_name} has {blocks.shape[1]} bytes; "
            f"{found.values} values take {found.num_bytes}"
        )
    return LowBitRows(parts=(BlockRows(format=found, blocks=np.ascontiguousarray(blocks)),))


def _whole_blocks(first: int, last: int, depth: int, size: int) -> slice:
    """The blocks of `size` columns that columns first … last - 1 of `depth` are. The last block may be shorter."""
    if first % size or (last % size and last != depth):
        raise ConfigError(f"columns {first} to {last} cut blocks of {size}")
    return slice(first // size, -(-last // size))


def can_stack(weights: Sequence[LowBitRows]) -> bool:
    """Return whether all weights take their inputs in the same order."""
    first = weights[0].order
    if first is None:
        return all(weight.order is None for weight in weights)
    return all(weight.order is not None and np.array_equal(weight.order, first) for weight in weights)


def stack_low_bit(weights: Sequence[LowBitRows]) -> LowBitRows:
    """The rows of all weights, in order; each part stays as it is. can_stack must hold."""
    assert can_stack(weights), "inputs in several orders"
    return LowBitRows(parts=tuple(part for weight in weights for part in weight.parts), order=weights[0].order)


def group_rows(
    codes: Bytes,
    *,
    bits: int,
    zero_point: int,
    scales: Floats32,
    minimums: Floats32 | None = None,
) -> GroupRows:
    """A weight whose groups have one size, K over the number of scales of a row.

    Groups that no power of two of 32 to 256 values divides evenly are cut into smaller ones with the same scale;
    one scale a row is one for 256 values.
    Raises ConfigError for codes of other than 4 or 8 bits, or groups that are no multiple of 32.
    """
    (num_rows, depth), num_groups = codes.shape, scales.shape[1]
    if bits not in _BITS:
        raise ConfigError(f"a weight has codes of {bits} bits; low-bit products have 4 or 8")
    if scales.shape != (num_rows, num_groups) or num_groups == 0 or depth % num_groups:
        raise ConfigError(f"a weight of {[num_rows, depth]} has scales of {list(scales.shape)}")
    size = depth // num_groups
    if size % MULTIPLIED:
        raise ConfigError(f"a group has {size} values; low-bit products have groups of multiples of {MULTIPLIED}")
    in_memory = SPAN if num_groups == 1 else math.gcd(size, SPAN)
    count = -(-depth // in_memory)

    def spread(factors: Floats32) -> Floats32:
        return np.ascontiguousarray(factors.repeat(-(-size // in_memory), 1)[:, :count], np.float32)

    return GroupRows(
        codes=np.ascontiguousarray(codes),
        bits=bits,
        zero_point=zero_point,
        group_size=in_memory,
        scales=spread(scales),
        minimums=None if minimums is None else spread(minimums),
    )


def _is_half(factors: Floats32) -> bool:
    with np.errstate(over="ignore"):
        return np.array_equal(factors.astype(np.float16).astype(np.float32), factors)


def quantise(weight: Floats32, scheme: Scheme) -> GroupRows:
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


Fit = tuple[Bytes, Floats32, Floats32]


def _int8(groups: Floats32) -> Fit:
    """groups: [G, values]. Codes, scales [G], and no minimums."""
    scales = _half(np.abs(groups).max(1) / np.float32(127))
    codes = np.rint(groups * _inverse(scales)[:, None]).clip(-127, 127) + 128
    return codes.astype(np.uint8), scales, np.zeros_like(scales)


def _int4(groups: Floats32) -> Fit:
    """groups: [G, values]. Codes, scales and minimums [G]."""
    values = np.ascontiguousarray(groups.T)  # [values, G]: sums run over the values
    count = np.float32(len(values))
    low, high = values.min(0), values.max(0)
    span = high - low
    total = _sum(values)
    best, scales, minimums = np.full_like(low, np.inf), np.zeros_like(low), np.zeros_like(low)
    for steps in STEPS:
        flat = span < SMALLEST_SPAN
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


def _codes(values: Floats32, scales: Floats32, minimums: Floats32) -> Floats32:
    codes: Floats32 = np.rint((values - minimums) * _inverse(scales)).clip(0, 15)
    return codes


def _inverse(scales: Floats32) -> Floats32:
    """1 / scale; 0 where that is 0."""
    none = scales == 0
    return np.where(none, np.float32(0), np.float32(1) / np.where(none, np.float32(1), scales))


def _sum(values: Floats32) -> Floats32:
    """Add up values [values, G] to [G], one after the other."""
    total: Floats32 = np.zeros_like(values[0])
    for each in values:
        total += each
    return total


def _half(values: npt.NDArray[np.floating[Any]]) -> Floats32:
    return values.astype(np.float16).astype(np.float32)
