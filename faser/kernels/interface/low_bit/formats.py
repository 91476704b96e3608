"""The block formats of low-bit weights, as GGUF files store them, and what the bytes of a block stand for.

In every format a weight stands for (code - zero point) * scale + minimum. Its code is an unsigned integer of up
to eight bits; scale and minimum belong to a group of 32 (Q6_K: 16) consecutive values of a row, and are float32
numbers without rounding: half floats, half floats of a block of 256 times integers of six to eight bits, or powers
of two.

    format    values  bytes  code     zero point  group  scale        minimum        memory form
    Q4_0          32     18  0 … 15            8     32  half         -              nibbles
    Q4_1          32     20  0 … 15            0     32  half         half           nibbles
    Q5_0          32     22  0 … 31           16     32  half         -              six bits
    Q5_1          32     24  0 … 31            0     32  half         half           six bits
    Q8_0          32     34  0 … 255         128     32  half         -              bytes
    Q4_K         256    144  0 … 15            0     32  half * int6  half * int6    nibbles
    Q5_K         256    176  0 … 31            0     32  half * int6  half * int6    six bits
    Q6_K         256    210  0 … 63           32     16  half * int8  -              six bits
    IQ4_NL        32     18  16 codes        128     32  half         -              nibbles that name codes
    IQ4_XS       256    136  16 codes        128     32  half * int6  -              nibbles that name codes
    MXFP4         32     17  16 codes         12     32  power of 2   -              floats of four bits

A nibble of MXFP4 is a float with a sign, two bits of exponent and one of mantissa (E2M1), whose code is 12 plus
twice its value; its group's byte e (E8M0) scales the code by 2^(e - 128).

Source: the layouts of ggml (ggml-org/llama.cpp, ggml-common.h), as the package gguf reads them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from faser.types.arrays import Bytes, Floats32

# Signed values that the nibbles of IQ4_NL and IQ4_XS name.
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the values of floats of four bits.
_FLOAT4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_FLOAT4_ZERO = 12
_SIGNED = 128  # added to a signed byte to make it a code


class MemoryForm(IntEnum):
    """Layouts of codes in memory. Numbered as in the native kernels' layout.h."""

    NIBBLES = 0
    NAMED_NIBBLES = 1
    BYTES = 2
    SIXES = 3
    SIXES_OF_16 = 4  # groups of 16
    FLOATS_OF_4 = 5

    @property
    def description(self) -> str:
        sixes = (MemoryForm.SIXES, MemoryForm.SIXES_OF_16)
        bits = 8 if self is MemoryForm.BYTES else 6 if self in sixes else 4
        return f"{bits}-bit codes"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFactors:
    """Scales or minimums of rows, one for each group.

    values: [N, K / group]. halves: [N, K / 256], half floats that multiply those values, which are integers then;
    or None.
    """

    values: Floats32
    halves: Floats32 | None = None

    @property
    def products(self) -> Floats32:
        """Return the factors [N, K / group], exactly."""
        if self.halves is None:
            return self.values
        return self.values * self.halves.repeat(self.values.shape[1] // self.halves.shape[1], 1)

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + (0 if self.halves is None else self.halves.nbytes)

    def of_rows(self, count: int) -> "GroupFactors":
        """Those of consecutive blocks, as factors of `count` rows."""
        halves = None if self.halves is None else self.halves.reshape(count, -1)
        return GroupFactors(values=self.values.reshape(count, -1), halves=halves)

    def take(self, rows: npt.NDArray[np.int64]) -> "GroupFactors":
        return GroupFactors(values=self.values[rows], halves=None if self.halves is None else self.halves[rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedRows:
    """codes: [N, K] uint8. A weight is dequantised()."""

    codes: Bytes
    zero_point: int
    scales: GroupFactors
    minimums: GroupFactors | None

    @property
    def group(self) -> int:
        """Consecutive values of a row that share a scale."""
        return int(self.codes.shape[1] // self.scales.values.shape[1])

    @property
    def num_bytes(self) -> int:
        minimums = 0 if self.minimums is None else self.minimums.num_bytes
        return self.codes.nbytes + self.scales.num_bytes + minimums

    def take(self, rows: npt.NDArray[np.int64]) -> "DecodedRows":
        return DecodedRows(
            codes=self.codes[rows],
            zero_point=self.zero_point,
            scales=self.scales.take(rows),
            minimums=None if self.minimums is None else self.minimums.take(rows),
        )

    def dequantised(self) -> Floats32:
        """Return every weight [N, K], the sum with its minimum rounded once."""
        scales = self.scales.products.repeat(self.group, 1)
        values = (self.codes.astype(np.float32) - np.float32(self.zero_point)) * scales
        return values if self.minimums is None else values + self.minimums.products.repeat(self.group, 1)


# Of blocks [B, num_bytes]: codes [B, values], scales and minimums, a row for each block.
DecodedBlocks = tuple[Bytes, GroupFactors, GroupFactors | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """number: of the type in ggml. values, num_bytes: of a block. has_superblocks: scales are products."""

    name: str
    number: int
    values: int
    num_bytes: int
    form: MemoryForm
    zero_point: int
    has_superblocks: bool
    has_minimums: bool
    read: Callable[[Bytes], DecodedBlocks]

    def decode(self, rows: Bytes) -> DecodedRows:
        """rows: [N, bytes of a row]."""
        codes, scales, minimums = self.read(rows.reshape(-1, self.num_bytes))
        count = len(rows)
        return DecodedRows(
            codes=codes.reshape(count, -1),
            zero_point=self.zero_point,
            scales=scales.of_rows(count),
            minimums=None if minimums is None else minimums.of_rows(count),
        )


def _halves(blocks: Bytes, at: int) -> Floats32:
    """Return the half float at a byte of every block: [B, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _one_each(blocks: Bytes, at: int) -> GroupFactors:
    """Return the factors of blocks with one group: the half float at a byte."""
    return GroupFactors(values=_halves(blocks, at))


def _nibbles(halves: Bytes, together: int) -> Bytes:
    """Return [B, 2 n] of [B, n]: the low halves of `together` bytes, then their high halves, and so on."""
    pairs = halves.reshape(len(halves), -1, 1, together) >> np.array([0, 4], np.uint8).reshape(2, 1)
    return (pairs & np.uint8(15)).reshape(len(halves), -1)


def _bits(words: Bytes, count: int, shifts: Sequence[int]) -> Bytes:
    """words: [B, n] or [B, g, n]. `count` bits of n bytes at every shift, [B, g * len(shifts) * n]."""
    fields = words[..., None, :] >> np.array(shifts, np.uint8).reshape(-1, 1)
    return (fields & np.uint8((1 << count) - 1)).reshape(len(words), -1)


def _fifth_bits(words: Bytes) -> Bytes:
    """Return [B, 32] of [B, 4]: the bits of four bytes, from the lowest one on, as the fifth bits of codes."""
    return np.unpackbits(words, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> DecodedBlocks:
    return _nibbles(blocks[:, 2:], 16), _one_each(blocks, 0), None


def _q4_1(blocks: Bytes) -> DecodedBlocks:
    return _nibbles(blocks[:, 4:], 16), _one_each(blocks, 0), _one_each(blocks, 2)


def _q5_0(blocks: Bytes) -> DecodedBlocks:
    return _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6]), _one_each(blocks, 0), None


def _q5_1(blocks: Bytes) -> DecodedBlocks:
    codes = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return codes, _one_each(blocks, 0), _one_each(blocks, 2)


def _q8_0(blocks: Bytes) -> DecodedBlocks:
    return blocks[:, 2:] ^ np.uint8(_SIGNED), _one_each(blocks, 0), None


def _six_bits(packed: Bytes) -> tuple[Floats32, Floats32]:
    """Eight integers that scale and eight that lower, [B, 8] each, out of twelve bytes."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], 1)
    minimums = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], 1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _k_factors(blocks: Bytes) -> tuple[GroupFactors, GroupFactors]:
    """Scales and minimums of Q4_K and Q5_K. The formats subtract their minimums."""
    scales, minimums = _six_bits(blocks[:, 4:16])
    lowering = -_halves(blocks, 2)
    return GroupFactors(values=scales, halves=_halves(blocks, 0)), GroupFactors(values=minimums, halves=lowering)


def _q4_k(blocks: Bytes) -> DecodedBlocks:
    return _nibbles(blocks[:, 16:], 32), *_k_factors(blocks)


def _q5_k(blocks: Bytes) -> DecodedBlocks:
    fifth = _bits(blocks[:, 16:48], 1, range(8)) << np.uint8(4)
    return _nibbles(blocks[:, 48:], 32) | fifth, *_k_factors(blocks)


def _q6_k(blocks: Bytes) -> DecodedBlocks:
    upper = _bits(blocks[:, 128:192].reshape(-1, 2, 32), 2, (0, 2, 4, 6)) << np.uint8(4)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _nibbles(blocks[:, :128], 64) | upper, GroupFactors(values=scales, halves=_halves(blocks, 208)), None


def _named(nibbles: Bytes) -> Bytes:
    return np.array([value + _SIGNED for value in _IQ4_VALUES], np.uint8)[nibbles]


def _iq4_nl(blocks: Bytes) -> DecodedBlocks:
    return _named(_nibbles(blocks[:, 2:], 16)), _one_each(blocks, 0), None


def _iq4_xs(blocks: Bytes) -> DecodedBlocks:
    upper = _bits(blocks[:, 2:4, None], 2, (0, 2, 4, 6)) << np.uint8(4)
    scales = (_bits(blocks[:, 4:8, None], 4, (0, 4)) | upper).astype(np.float32) - np.float32(32)
    return _named(_nibbles(blocks[:, 8:], 16)), GroupFactors(values=scales, halves=_halves(blocks, 0)), None


def _mxfp4(blocks: Bytes) -> DecodedBlocks:
    """The byte 255, which is no number in E8M0, scales by infinity."""
    codes = np.array([value + _FLOAT4_ZERO for value in _FLOAT4_VALUES], np.uint8)
    exponents = blocks[:, :1].astype(np.uint32)
    twice = np.where(exponents == 0, np.uint32(0x00400000), exponents << np.uint32(23)).view(np.float32)
    return codes[_nibbles(blocks[:, 1:], 16)], GroupFactors(values=twice * np.float32(0.5)), None


def _format(
    name: str,
    number: int,
    size: tuple[int, int],
    form: MemoryForm,
    zero_point: int,
    read: Callable[[Bytes], DecodedBlocks],
    *,
    has_minimums: bool = False,
) -> BlockFormat:
    values, num_bytes = size
    return BlockFormat(
        name=name,
        number=number,
        values=values,
        num_bytes=num_bytes,
        form=form,
        zero_point=zero_point,
        has_superblocks=values > 32,
        has_minimums=has_minimums,
        read=read,
    )


FORMATS = {
    each.name: each
    for each in (
        _format("Q4_0", 2, (32, 18), MemoryForm.NIBBLES, 8, _q4_0),
        _format("Q4_1", 3, (32, 20), MemoryForm.NIBBLES, 0, _q4_1, has_minimums=True),
        _format("Q5_0", 6, (32, 22), MemoryForm.SIXES, 16, _q5_0),
        _format("Q5_1", 7, (32, 24), MemoryForm.SIXES, 0, _q5_1, has_minimums=True),
        _format("Q8_0", 8, (32, 34), MemoryForm.BYTES, _SIGNED, _q8_0),
        _format("Q4_K", 12, (256, 144), MemoryForm.NIBBLES, 0, _q4_k, has_minimums=True),
        _format("Q5_K", 13, (256, 176), MemoryForm.SIXES, 0, _q5_k, has_minimums=True),
        _format("Q6_K", 14, (256, 210), MemoryForm.SIXES_OF_16, 32, _q6_k),
        _format("IQ4_NL", 20, (32, 18), MemoryForm.NAMED_NIBBLES, _SIGNED, _iq4_nl),
        _format("IQ4_XS", 23, (256, 136), MemoryForm.NAMED_NIBBLES, _SIGNED, _iq4_xs),
        _format("MXFP4", 39, (32, 17), MemoryForm.FLOATS_OF_4, _FLOAT4_ZERO, _mxfp4),
    )
}
