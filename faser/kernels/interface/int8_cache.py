"""Keys and values as signed bytes with one scale a head and token: what a cache of int8 stores, and its error.

Of the D numbers of one key or value, the largest magnitude m decides the scale s: m / 127, rounded up to bfloat16,
and at least 2**-126. A number x becomes the nearest integer to x / s, ties to even, within ±127, and stands for
that integer times s. So nothing clips, nothing is calibrated, and no token depends on the others in its block. A
scale in bfloat16 takes two bytes and has the range of float32; rounding it up costs less than 1 % of the error. If
a number of a key or value is not finite, its scale is NaN, and so is the attention of each row that sees it.

The error of a stored number is at most s / 2, and s <= max(m * (1 + 2**-7) / 127, 2**-126). From there it is as in
interface/fp8_cache.py: let e be the largest change of a score, at most scale * sum over d of |q| s / 2 with the s
of a key; then a component of the result is off by at most the largest s / 2 of its values, plus tanh(e / 2) times
the distance between their largest and their least.

A backend that multiplies integers rounds two things more. A query becomes integers up to ±16256 (15 bits), which
changes a score by at most scale * |k'|_1 * max |q| / 32512, with k' the stored key: that is added to e. Weights
times scales of values become integers up to 32767, with one unit for a span of 256 positions: where each of the
256 is rounded the same way, by half a unit, this moves a component by the largest s / 2 of the values once more.
As a rule roundings cancel, and it is a hundred times less.
"""

import torch
from torch import Tensor

SCALE_DTYPE = torch.bfloat16
_LEAST_SCALE = 2.0**-126


def quantise_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [..., D] int8 and scales [...] bfloat16 of keys or values x [..., D]. The oracle of kernels."""
    wide = x.float()
    most = wide.abs().amax(-1)
    upwards = ((most / 127).view(torch.int32) + 0xFFFF) & ~0xFFFF
    scales = upwards.view(torch.float32).clamp(min=_LEAST_SCALE)
    finite = most.isfinite()
    codes = (wide / scales[..., None]).round()
    codes = torch.where(finite[..., None], codes, 0).to(torch.int8)
    return codes, torch.where(finite, scales, torch.nan).to(SCALE_DTYPE)


def dequantised(codes: Tensor, scales: Tensor) -> Tensor:
    """[..., D] float32, exactly what codes [..., D] and scales [...] stand for."""
    return codes.float() * scales.float()[..., None]
