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

So a row's result depends neither on the other rows nor on threads, tiles or the CPU: the native kernels give these
bits on every instruction set.

The error: x differs from t * x' by at most t / 2 (1 + 2^-16), and out from the product of the dequantised weight
with x by no more than the sum over k of |w| t / 2 besides float32's roundings. Q8_0, Q4_0 and their kin bring no
error of their own: what a file stores is what is computed with.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from faser.kernels.interface.low_bit.formats import DecodedRows, Floats
from faser.kernels.interface.low_bit.rows import LowBitRows

STRETCH = 64  # values of a row that share a scale
_LEAST_LARGEST = np.float32(2.0**-100)  # so that no scale is zero and no quotient overflows


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedActivations:
    """values: [R, K] integers of -127 … 127. scales: [R, stretches]."""

    values: npt.NDArray[np.int8]
    scales: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedLowBit:
    """A product with a low-bit weight [N, K], its parts decoded. bias: [N] in float32. order: see LowBitRows."""

    parts: tuple[DecodedRows, ...]
    bias: Tensor | None
    shape: tuple[int, int]
    order: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Of codes, scales and minimums as they are kept here, and of the bias."""
        arrays = [each for part in self.parts for each in (part.codes, part.scales, part.minimums)]
        return sum(each.nbytes for each in (*arrays, self.bias) if each is not None)

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
            wanted = (ids[mine] - first).numpy()
            rows = DecodedRows(
                codes=part.codes[wanted],
                zero_point=part.zero_point,
                scales=part.scales[wanted],
                minimums=None if part.minimums is None else part.minimums[wanted],
            )
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


def quantise_activations(x: Floats) -> QuantisedActivations:
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


def _product(rows: QuantisedActivations, weight: DecodedRows) -> Floats:
    """[R, N]: one part's columns."""
    (count, depth), group = rows.values.shape, weight.group
    out = np.zeros((count, len(weight.codes)), np.float32)
    partial = np.zeros_like(out)
    signed = weight.codes.astype(np.int32) - weight.zero_point
    values = rows.values.astype(np.int32)
    for number, first in enumerate(range(0, depth, group)):
        x, codes = values[:, first : first + group], signed[:, first : first + group]
        partial = fused(weight.scales[:, number], (x @ codes.T).astype(np.float32), partial)
        if weight.minimums is not None:
            partial = fused(weight.minimums[:, number], x.sum(1, keepdims=True).astype(np.float32), partial)
        if (first + group) % STRETCH == 0 or first + group == depth:
            out = fused(rows.scales[:, first // STRETCH, None], partial, out)
            partial = np.zeros_like(out)
    return out


def fused(a: Floats, b: Floats, c: Floats) -> Floats:
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
