"""Products with low-bit weights: the arithmetic that defines them, bit for bit.

A row x of activations is cut into stretches of 64 values. A stretch has one scale, its largest magnitude over
127, and its values become signed bytes: x * (127 / largest), to the nearest integer, ties to even. Nothing is
calibrated. With a weight's codes c, zero point z, scales s and minimums m (formats.py), out[r, n] is computed in
this order, in float32; x += y * z is one operation, rounded once (a fused multiply-add):

    for each stretch                                                        t: its scale in row r
        partial = 0
        for each group g of the weight in the stretch, in order
            partial += s[n, g] * sum over k in g of (c[n, k] - z) * x'[r, k]          the sum: exact, an integer
            partial += m[n, g] * sum over k in g of x'[r, k]                          if the format has minimums
        out += t * partial
    out += bias; out += residual; rounded once to the type of out

In formats with superblocks of 256 values s and m are small integers times half floats S and M of the superblock.
There a stretch is one integer, and S and M multiply once:

    for each superblock
        scaled = 0; lowered = 0
        for each stretch of the superblock
            scaled += t * sum over its g of s[n, g] * sum over k in g of (c[n, k] - z) * x'[r, k]
        for each group g of the superblock, in order
            lowered += m[n, g] * (t * sum over k in g of x'[r, k])                    t * sum: rounded
        out += S[n] * scaled
        out += M[n] * lowered                                                         if the format has minimums

The integer is exact, then rounded once to float32. It is below 2^25: of 64 values, 63 * 15 * 127 * 64 (Q4_K),
63 * 31 * 127 * 64 (Q5_K), 128 * 32 * 127 * 64 (Q6_K), 32 * 127 * 127 * 64 (IQ4_XS). Of 32 values it is below 2^24,
which float32 holds. Integer scales within a superblock are those of ggml's products of K formats with Q8_K
(ggml-org/llama.cpp, ggml-cpu/quants.c), whose activations have one scale for 256 values.

So a row's result depends neither on the other rows nor on threads, tiles or the CPU: the native kernels give these
bits on every instruction set.

The error: x differs from t * x' by at most t / 2 (1 + 2^-16), and out from the product of the dequantised weight
with x by no more than the sum over k of |w| t / 2 besides float32's roundings. Q8_0, Q4_0 and their kin bring no
error of their own: what a file stores is what is computed with.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from faser.kernels.interface.low_bit.formats import DecodedRows
from faser.kernels.interface.low_bit.rows import LowBitRows
from faser.types.arrays import Floats32

STRETCH = 64  # values of a row that share a scale
_LEAST_LARGEST = np.float32(2.0**-100)  # so that no scale is zero and no quotient overflows


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedActivations:
    """values: [R, K] integers of -127 … 127. scales: [R, stretches]."""

    values: npt.NDArray[np.int8]
    scales: Floats32


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedLowBit:
    """A product with a low-bit weight [N, K], its parts decoded. bias: [N] in float32. order: see LowBitRows."""

    parts: tuple[DecodedRows, ...]
    bias: Tensor | None
    shape: tuple[int, int]
    order: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of codes, scales and minimums as they are kept here, and of the bias."""
        return sum(part.num_bytes for part in self.parts) + (0 if self.bias is None else self.bias.nbytes)

    def linear(self, x: Tensor, out: Tensor, residual: Tensor | None) -> Tensor:
        """See Backend.linear. A row of x with an infinity or a NaN gets no finite product."""
        if self.order is not None:
            x = x[:, self.order.to(x.device)]
        rows = quantise_activations(x.float().cpu().numpy())
        total = torch.from_numpy(np.concatenate([_product(rows, part) for part in self.parts], 1)).to(out.device)
        for addend in (self.bias, residual):
            if addend is not None:
                total += addend
        return out.copy_(total)

    def embed(self, token_ids: Tensor, out: Tensor) -> Tensor:
        """See Backend.embed: rows of the dequantised weight, rounded once."""
        ids = token_ids.cpu()
        outside = ids[(ids < 0) | (ids >= self.shape[0])]
        if len(outside):
            raise IndexError(f"token id {int(outside[0])}; the embedding has {self.shape[0]} rows")
        first = 0
        for part in self.parts:
            mine = (ids >= first) & (ids < first + len(part.codes))
            rows = part.take((ids[mine] - first).numpy())
            out[mine.to(out.device)] = torch.from_numpy(rows.dequantised()).to(out)
            first += len(part.codes)
        if self.order is not None:
            out[:, self.order.to(out.device)] = out.clone()
        return out


def decode_low_bit(weight: LowBitRows, bias: Tensor | None) -> DecodedLowBit:
    """Copies; codes take a byte each."""
    return DecodedLowBit(
        parts=tuple(part.decode() for part in weight.parts),
        bias=None if bias is None else bias.float().clone(),
        shape=weight.shape,
        order=None if weight.order is None else torch.from_numpy(weight.order.astype(np.int64)),
    )


def quantise_activations(x: Floats32) -> QuantisedActivations:
    """x: [R, K]."""
    rows, depth = x.shape
    num_stretches = -(-depth // STRETCH)
    padded = np.zeros((rows, num_stretches, STRETCH), np.float32)
    padded.reshape(rows, -1)[:, :depth] = x
    largest = np.maximum(np.abs(padded).max(2), _LEAST_LARGEST)  # NaN where there is one
    finite = np.isfinite(largest)
    safe = np.where(finite, largest, np.float32(1))
    scaled = np.where(finite[..., None], padded, np.float32(0)) * (np.float32(127) / safe)[..., None]
    return QuantisedActivations(
        values=np.rint(scaled).astype(np.int8).reshape(rows, -1)[:, :depth],
        scales=np.where(finite, safe / np.float32(127), np.float32("nan")),
    )


def _product(rows: QuantisedActivations, weight: DecodedRows) -> Floats32:
    """Return the columns [R, N] of one part."""
    return _of_groups(rows, weight) if weight.scales.halves is None else _of_superblocks(rows, weight)


def _of_groups(rows: QuantisedActivations, weight: DecodedRows) -> Floats32:
    depth, group, minimums = rows.values.shape[1], weight.group, weight.minimums
    out = np.zeros((len(rows.values), len(weight.codes)), np.float32)
    partial = np.zeros_like(out)
    for number, (dots, sums) in enumerate(_integer_sums(rows, weight)):
        partial = fused(weight.scales.values[:, number], dots.astype(np.float32), partial)
        if minimums is not None:
            partial = fused(minimums.values[:, number], sums.astype(np.float32), partial)
        end = (number + 1) * group
        if end % STRETCH == 0 or end == depth:
            out = fused(rows.scales[:, (end - 1) // STRETCH, None], partial, out)
            partial = np.zeros_like(out)
    return out


def _of_superblocks(rows: QuantisedActivations, weight: DecodedRows) -> Floats32:
    scales, minimums = weight.scales, weight.minimums
    assert scales.halves is not None
    integers = scales.values.astype(np.int32)
    groups, in_stretch = integers.shape[1] // scales.halves.shape[1], STRETCH // weight.group
    out = np.zeros((len(rows.values), len(weight.codes)), np.float32)
    scaled, lowered, integer = np.zeros_like(out), np.zeros_like(out), np.zeros(out.shape, np.int32)
    for number, (dots, sums) in enumerate(_integer_sums(rows, weight)):
        stretch_scales = rows.scales[:, number // in_stretch, None]
        integer += integers[:, number] * dots
        if (number + 1) % in_stretch == 0:
            scaled = fused(stretch_scales, integer.astype(np.float32), scaled)
            integer = np.zeros_like(integer)
        if minimums is not None:
            lowered = fused(minimums.values[:, number], stretch_scales * sums.astype(np.float32), lowered)
        if (number + 1) % groups == 0:
            out = fused(scales.halves[:, number // groups], scaled, out)
            if minimums is not None and minimums.halves is not None:
                out = fused(minimums.halves[:, number // groups], lowered, out)
            scaled, lowered = np.zeros_like(out), np.zeros_like(out)
    return out


Integers = npt.NDArray[np.int32]


def _integer_sums(rows: QuantisedActivations, weight: DecodedRows) -> Iterator[tuple[Integers, Integers]]:
    """Yield by group the products of activations and codes less the zero point [R, N], and activations [R, 1]."""
    values, codes = rows.values.astype(np.int32), weight.codes.astype(np.int32) - weight.zero_point
    for first in range(0, values.shape[1], weight.group):
        x = values[:, first : first + weight.group]
        yield x @ codes[:, first : first + weight.group].T, x.sum(1, np.int32, keepdims=True)


def fused(a: Floats32, b: Floats32, c: Floats32) -> Floats32:
    """a * b + c, rounded once. Arrays that broadcast to the shape of c.

    In float64 the product is exact and the sum is rounded to odd, which makes the second rounding that of the
    exact sum (Boldo and Melquiond, Emulation of a FMA and correctly rounded sums, 2008).
    """
    product, addend = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + addend
    back = total - product
    missing = (product - (total - back)) + (addend - back)  # exactly what the sum left out
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (missing != 0) & (bits % 2 == 0)
    bits += inexact * np.where((missing > 0) == (total > 0), 1, -1)
    return total.astype(np.float32)
