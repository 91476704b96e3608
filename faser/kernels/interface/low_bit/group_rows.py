"""GroupRows: a weight of integers with a scale, and perhaps a minimum, for every group of consecutive values."""

import math
from dataclasses import dataclass

import numpy as np

from faser.errors import ConfigError
from faser.kernels.interface.low_bit.formats import Bytes, DecodedRows, Floats, MemoryForm

MULTIPLIED = 32  # values that one integer sum of a product covers
SPAN = 256  # values that a scale in memory covers at most
_BITS = (4, 8)


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
    scales: Floats
    minimums: Floats | None

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
        """Whether half floats hold every scale and minimum without rounding."""
        return all(_is_half(factors) for factors in (self.scales, self.minimums) if factors is not None)

    @property
    def num_bytes(self) -> int:
        """Of codes, scales and minimums, packed."""
        factors = self.scales.size + (0 if self.minimums is None else self.minimums.size)
        return self.codes.size * self.bits // 8 + factors * (2 if self.has_half_factors else 4)

    def decode(self) -> DecodedRows:
        """In groups of 32: what products compute with."""

        def spread(factors: Floats) -> Floats:
            return factors.repeat(self.group_size // MULTIPLIED, 1)[:, : self.depth // MULTIPLIED]

        return DecodedRows(
            codes=self.codes,
            zero_point=self.zero_point,
            scales=spread(self.scales),
            minimums=None if self.minimums is None else spread(self.minimums),
        )


def group_rows(
    codes: Bytes,
    *,
    bits: int,
    zero_point: int,
    scales: Floats,
    minimums: Floats | None = None,
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

    def spread(factors: Floats) -> Floats:
        return np.ascontiguousarray(factors.repeat(-(-size // in_memory), 1)[:, :count], np.float32)

    return GroupRows(
        codes=np.ascontiguousarray(codes),
        bits=bits,
        zero_point=zero_point,
        group_size=in_memory,
        scales=spread(scales),
        minimums=None if minimums is None else spread(minimums),
    )


def _is_half(factors: Floats) -> bool:
    with np.errstate(over="ignore"):
        return np.array_equal(factors.astype(np.float16).astype(np.float32), factors)
