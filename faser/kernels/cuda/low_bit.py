"""Low-bit weights in a GPU's memory: codes of 4 or 8 bits, as stored, with the factors of their groups.

    weight[n, k] = (code[n, k] - zero_point) * scale[n, k / group] (+ minimum[n, k / group])

A byte holds two codes of 4 bits, the lower half that of the lower column. Codes of 5 and 6 bits, and nibbles that
name one of 16 codes, take a byte each; floats of four bits (MXFP4) stay nibbles, and their scales the byte of an
exponent. Factors of superblocks (GGUF's K formats) stay integers times half floats. So nothing is rounded: kernels
compute with the weights that the checkpoint stands for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from faser.errors import ConfigError
from faser.kernels.cuda.rounding import rounded
from faser.kernels.interface.low_bit.formats import BlockFormat, GroupFactors, MemoryForm
from faser.kernels.interface.low_bit.rows import BlockRows, FloatRows, GroupRows, LowBitPart, LowBitRows
from faser.optional import maybe
from faser.types.arrays import Bytes

GROUPS = (16, 32, 64, 128, 256)
_FLOAT4_CODES = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the magnitudes that three bits name
_SMALLEST_POWER = 0x00400000  # bits of 2 ** -127, which the exponent 0 names
_MIDDLE = 128  # zero point of codes of one byte


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Scales or minimums of groups. values: [N, K / group rounded up], of any number type.

    Values of type uint8 are exponents e: they name 2 ** (e - 128). halves: [N, groups / per_half], half floats
    that multiply the values; None: nothing does.
    """

    values: Tensor
    halves: Tensor | None

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + (0 if self.halves is None else self.halves.nbytes)

    @property
    def per_half(self) -> int:
        """Return how many groups share a half float."""
        return 1 if self.halves is None else self.values.shape[1] // self.halves.shape[1]

    def products(self) -> Tensor:
        """Return the factors [N, groups] float32."""
        if self.values.dtype is torch.uint8:
            bits = self.values.int() << 23
            return torch.where(bits == 0, _SMALLEST_POWER, bits).view(torch.float32) * 0.5
        wide = self.values.float()
        return wide if self.halves is None else wide * self.halves.float().repeat_interleave(self.per_half, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowBitMatrix:
    """Rows of one kind. codes: [N, K / 2] uint8 for the forms nibbles and floats, [N, K] for bytes."""

    codes: Tensor
    form: str
    zero_point: int
    group: int
    scales: Factors
    minimums: Factors | None

    @property
    def num_rows(self) -> int:
        return len(self.codes)

    @property
    def width(self) -> int:
        """K: values of a row."""
        return self.codes.shape[1] * (1 if self.form == "bytes" else 2)

    @property
    def num_bytes(self) -> int:
        minimums = 0 if self.minimums is None else self.minimums.num_bytes
        return self.codes.nbytes + self.scales.num_bytes + minimums

    @property
    def kind(self) -> tuple[object, ...]:
        """Return what matrices must have in common to be one."""
        factors = [(each.values.dtype, each.per_half) for each in (self.scales, self.minimums) if each is not None]
        return (self.form, self.zero_point, self.group, *factors)

    def dequantised(self) -> Tensor:
        """Return the weights [N, K] float32 by tensor operations, the sum with a minimum rounded once."""
        wide = self._numbers().float()

        def spread(factors: Factors) -> Tensor:
            return factors.products().repeat_interleave(self.group, 1)[:, : self.width]

        wide *= spread(self.scales)
        return wide if self.minimums is None else wide + spread(self.minimums)

    def _numbers(self) -> Tensor:
        """Return codes less their zero point, [N, K] int16; of floats of four bits twice their values."""
        codes = self.codes
        if self.form != "bytes":
            codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
        if self.form != "floats":
            return codes.short() - self.zero_point
        sizes = torch.tensor(_FLOAT4_CODES, dtype=torch.int16, device=codes.device)[(codes & 7).long()]
        return torch.where(codes > 7, -sizes, sizes)

    def in_bytes(self, group: int) -> "LowBitMatrix":
        """Return the same weights in codes of one byte, with a factor for every `group` columns, a divisor."""

        def spread(factors: Factors) -> Factors:
            values = factors.products().repeat_interleave(self.group // group, 1)
            return Factors(values=values[:, : -(-self.width // group)].contiguous(), halves=None)

        return replace(
            self,
            codes=(self._numbers() + _MIDDLE).to(torch.uint8),
            form="bytes",
            zero_point=_MIDDLE,
            group=group,
            scales=spread(self.scales),
            minimums=maybe(spread, self.minimums),
        )


@dataclass(frozen=True, slots=True)
class CudaLowBit:
    """A packed low-bit product. parts: their rows follow one another. bias: [N], of the activations' type.

    order: [K] int64, the input that each column multiplies; None: the k-th column multiplies input k.
    """

    parts: tuple[LowBitMatrix, ...]
    bias: Tensor | None
    order: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        return sum(each.num_rows for each in self.parts), self.parts[0].width

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.parts) + (0 if self.bias is None else self.bias.nbytes)

    @property
    def single(self) -> LowBitMatrix | None:
        """Return the matrix of a product that is one, with inputs in order; None: it is more than that."""
        return self.parts[0] if len(self.parts) == 1 and self.order is None else None


def pack_low_bit(weight: LowBitRows, bias: Tensor | None, device: torch.device) -> CudaLowBit:
    """Copy a low-bit product to the device; parts of one kind become one.

    Raises ConfigError for rows whose length is no multiple of 32.
    """
    if weight.shape[1] % 32:
        raise ConfigError(f"rows of a low-bit weight have {weight.shape[1]} values; kernels take multiples of 32")
    parts = [_matrix(each, device) for each in weight.parts]
    joined = tuple(stacked(list(same)) for _, same in groupby(parts, key=lambda each: each.kind))
    order = None if weight.order is None else torch.from_numpy(weight.order.astype(np.int64)).to(device)
    return CudaLowBit(joined, None if bias is None else bias.to(device, copy=True), order)


def _matrix(part: LowBitPart, device: torch.device) -> LowBitMatrix:
    if isinstance(part, BlockRows) and part.format.form is MemoryForm.FLOATS_OF_4:
        return _floats_of_4(part.blocks, part.format, device)
    if isinstance(part, FloatRows):
        return _rounded(part, device)
    if isinstance(part, GroupRows):
        form, group, zero = part.form, part.group_size, part.zero_point
        codes, scales = part.codes, GroupFactors(values=part.scales)
        minimums = None if part.minimums is None else GroupFactors(values=part.minimums)
    else:
        decoded, form = part.decode(), part.format.form
        codes, group, zero = decoded.codes, decoded.group, decoded.zero_point
        scales, minimums = decoded.scales, decoded.minimums
    assert group in GROUPS, group
    found = torch.from_numpy(np.ascontiguousarray(codes)).to(device)
    if form is MemoryForm.NIBBLES:
        found = _pairs(found)
    return LowBitMatrix(
        codes=found.contiguous(),
        form="nibbles" if form is MemoryForm.NIBBLES else "bytes",
        zero_point=zero,
        group=group,
        scales=_factors(scales, device),
        minimums=None if minimums is None else _factors(minimums, device),
    )


def _rounded(part: FloatRows, device: torch.device) -> LowBitMatrix:
    scheme = part.scheme
    codes, scales, minimums = rounded(part.weight.to(device), scheme)
    return LowBitMatrix(
        codes=_pairs(codes) if scheme.form is MemoryForm.NIBBLES else codes,
        form="nibbles" if scheme.form is MemoryForm.NIBBLES else "bytes",
        zero_point=scheme.zero_point,
        group=scheme.group_size,
        scales=Factors(values=scales, halves=None),
        minimums=Factors(values=minimums, halves=None) if scheme.has_minimums else None,
    )


def _pairs(nibbles: Tensor) -> Tensor:
    return nibbles[..., ::2] | (nibbles[..., 1::2] << 4)


def _floats_of_4(blocks: Bytes, layout: BlockFormat, device: torch.device) -> LowBitMatrix:
    """Copy blocks of MXFP4 as they are, and put neighbours beside one another on the device."""
    given = np.require(blocks, requirements=["C", "W"])  # those of a mapped file cannot be written to
    found = torch.from_numpy(given).to(device).view(len(blocks), -1, layout.num_bytes)
    halves = found[..., 1:]
    return LowBitMatrix(
        codes=torch.cat((_pairs(halves & 15), _pairs(halves >> 4)), -1).flatten(1),
        form="floats",
        zero_point=0,
        group=layout.values,
        scales=Factors(values=found[..., 0].contiguous(), halves=None),
        minimums=None,
    )


def _factors(factors: GroupFactors, device: torch.device) -> Factors:
    """Copy factors in the narrowest type that holds them all."""
    values = torch.from_numpy(np.ascontiguousarray(factors.values))
    if factors.halves is None:
        narrow = values.half()
        values = narrow if torch.equal(narrow.float(), values) else values
        return Factors(values=values.to(device), halves=None)
    halves = torch.from_numpy(np.ascontiguousarray(factors.halves)).half()
    return Factors(values=values.to(torch.int8).to(device), halves=halves.to(device))


def stacked(parts: Sequence[LowBitMatrix]) -> LowBitMatrix:
    """Stack the rows of matrices of one kind; a single one stays as it is."""

    def together(factors: list[Factors]) -> Factors:
        halves = [each.halves for each in factors if each.halves is not None]
        return Factors(
            values=torch.cat([each.values for each in factors]), halves=torch.cat(halves) if halves else None
        )

    first = parts[0]
    if len(parts) == 1:
        return first
    minimums = [each.minimums for each in parts if each.minimums is not None]
    return LowBitMatrix(
        codes=torch.cat([each.codes for each in parts]),
        form=first.form,
        zero_point=first.zero_point,
        group=first.group,
        scales=together([each.scales for each in parts]),
        minimums=together(minimums) if minimums else None,
    )


def alike(matrices: Sequence[LowBitMatrix]) -> tuple[LowBitMatrix, ...]:
    """Return the same weights as matrices of one kind, those that are of one kind as they are.

    Where only factors differ, they become float32; else codes become bytes, and groups the smallest ones.
    """
    if len({each.kind for each in matrices}) == 1:
        return tuple(matrices)
    group, lowered = min(each.group for each in matrices), any(each.minimums is not None for each in matrices)
    if len({(each.form, each.zero_point, each.group) for each in matrices}) > 1:
        matrices = [each.in_bytes(group) for each in matrices]

    def widened(matrix: LowBitMatrix) -> LowBitMatrix:
        scales = Factors(values=matrix.scales.products(), halves=None)
        minimums = maybe(Factors.products, matrix.minimums)
        if minimums is None and lowered:
            minimums = torch.zeros_like(scales.values)
        return replace(
            matrix, scales=scales, minimums=None if minimums is None else Factors(values=minimums, halves=None)
        )

    return tuple(map(widened, matrices))
