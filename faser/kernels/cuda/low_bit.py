"""Low-bit weights in a GPU's memory: codes of 4 or 8 bits, as stored, with the factors of their groups.

    weight[n, k] = (code[n, k] - zero_point) * scale[n, k / group] (+ minimum[n, k / group])

A byte holds two codes of 4 bits, the lower half that of the lower column. Codes of 5 and 6 bits, and nibbles that
name one of 16 codes, take a byte each; floats of four bits (MXFP4) stay nibbles. Factors of superblocks (GGUF's K
formats) stay integers times half floats. So nothing is rounded: kernels compute with the weights that the
checkpoint stands for.
"""

from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from faser.errors import ConfigError
from faser.kernels.interface.low_bit.formats import GroupFactors, MemoryForm
from faser.kernels.interface.low_bit.rows import FloatRows, GroupRows, LowBitPart, LowBitRows, quantise

GROUPS = (16, 32, 64, 128, 256)
_FORMS = {MemoryForm.NIBBLES: "nibbles", MemoryForm.FLOATS_OF_4: "floats"}  # all others are bytes
_FLOAT4_CODES = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the magnitudes that three bits name
_FLOAT4_ZERO = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Scales or minimums of groups. values: [N, K / group rounded up], of any number type.

    halves: [N, groups / per_half], half floats that multiply the values; None: nothing does.
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
        codes = self.codes
        if self.form != "bytes":
            codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
        if self.form == "floats":
            sizes = torch.tensor(_FLOAT4_CODES, dtype=torch.float32, device=codes.device)[(codes & 7).long()]
            wide = torch.where(codes > 7, -sizes, sizes)
        else:
            wide = codes.float() - self.zero_point

        def spread(factors: Factors) -> Tensor:
            return factors.products().repeat_interleave(self.group, 1)[:, : self.width]

        wide *= spread(self.scales)
        return wide if self.minimums is None else wide + spread(self.minimums)


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
    joined = tuple(_joined(list(alike)) for _, alike in groupby(parts, key=lambda each: each.kind))
    order = None if weight.order is None else torch.from_numpy(weight.order.astype(np.int64)).to(device)
    return CudaLowBit(joined, None if bias is None else bias.to(device, copy=True), order)


def _matrix(part: LowBitPart, device: torch.device) -> LowBitMatrix:
    if isinstance(part, FloatRows):
        part = quantise(part.weight.float().cpu().numpy(), part.scheme)
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
    name = _FORMS.get(form, "bytes")
    if name == "floats":
        found, zero = _float_nibbles(found), 0
    if name != "bytes":
        found = found[:, ::2] | (found[:, 1::2] << 4)
    return LowBitMatrix(
        codes=found.contiguous(),
        form=name,
        zero_point=zero,
        group=group,
        scales=_factors(scales, device),
        minimums=None if minimums is None else _factors(minimums, device),
    )


def _float_nibbles(codes: Tensor) -> Tensor:
    """Return the nibbles of codes that are 12 plus twice a float of four bits."""
    nibbles = torch.zeros(2 * _FLOAT4_ZERO + 1, dtype=torch.uint8, device=codes.device)
    for nibble, size in enumerate(_FLOAT4_CODES):
        nibbles[_FLOAT4_ZERO + size] = nibble
        if size:
            nibbles[_FLOAT4_ZERO - size] = nibble + 8
    return nibbles[codes.long()]


def _factors(factors: GroupFactors, device: torch.device) -> Factors:
    """Copy factors in the narrowest type that holds them all."""
    values = torch.from_numpy(np.ascontiguousarray(factors.values))
    if factors.halves is None:
        narrow = values.half()
        values = narrow if torch.equal(narrow.float(), values) else values
        return Factors(values=values.to(device), halves=None)
    halves = torch.from_numpy(np.ascontiguousarray(factors.halves)).half()
    return Factors(values=values.to(torch.int8).to(device), halves=halves.to(device))


def _joined(parts: list[LowBitMatrix]) -> LowBitMatrix:
    """Stack the rows of matrices of one kind."""

    def stacked(factors: list[Factors]) -> Factors:
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
        scales=stacked([each.scales for each in parts]),
        minimums=stacked(minimums) if minimums else None,
    )
