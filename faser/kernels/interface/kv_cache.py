"""The KV cache: its size, what it stores in eight bits, and the error that this causes.

float8_e4m3fn. The scale is one, so nothing is calibrated and no token depends on the others in its block: a number
becomes the nearest one of the type, ties to even; a magnitude above 448 becomes 448; a NaN stays a NaN. Queries,
products and sums keep their types.

The error, with x' stored for x and |x| <= 448: |x' - x| <= max(|x| / 16, 2**-10), half a unit in the last place of
a normal and of a subnormal number. For one row, let e be the largest change of a score: at most scale * sum over d
of |q| dk, with dk that bound of a key. Then at most tanh(e / 2) of the attention moves from some positions to
others; in the worst case two groups of positions have half of it each, and scores fall by e in one group and rise
by e in the other. So a component of the result is off by at most the largest dv of its values, plus tanh(e / 2)
times the distance between their largest and their least. For keys and values above 448 there is no bound.

int8, with one scale a head and token. Of the D numbers of one key or value, the largest magnitude m decides the
scale s: m / 127, rounded up to bfloat16, and at least 2**-126. A number x becomes the nearest integer to x / s,
ties to even, within ±127, and stands for that integer times s. So nothing clips, nothing is calibrated, and no
token depends on the others in its block. A scale in bfloat16 takes two bytes and has the range of float32;
rounding it up costs less than 1 % of the error. If a number of a key or value is not finite, its scale is NaN, and
so is the attention of each row that sees it.

The error of a stored number is at most s / 2, and s <= max(m * (1 + 2**-7) / 127, 2**-126). From there it is as
above: let e be the largest change of a score, at most scale * sum over d of |q| s / 2 with the s of a key; then a
component of the result is off by at most the largest s / 2 of its values, plus tanh(e / 2) times the distance
between their largest and their least.

A backend that multiplies integers rounds two things more. A query becomes integers up to ±16256 (15 bits), which
changes a score by at most scale * |k'|_1 * max |q| / 32512, with k' the stored key: that is added to e. Weights
times scales of values become integers up to 32767, with one unit for a span of 256 positions: where each of the
256 is rounded the same way, by half a unit, this moves a component by the largest s / 2 of the values once more.
As a rule roundings cancel, and it is a hundred times less.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from faser.errors import ConfigError
from faser.kernels.interface.fp8 import FP8, FP8_MAX

SCALE_DTYPE = torch.bfloat16
_LEAST_SCALE = 2.0**-126


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """Size of a paged KV cache. Bytes count the keys and values of all layers, and their scales.

    heads: of each layer: how many key-value heads, and the channels of one. All layers have the same blocks, and a
    block holds its tokens in all of them. dtype: of the stored numbers: the type of the activations,
    float8_e4m3fn, or int8.
    """

    heads: tuple[tuple[int, int], ...]
    num_blocks: int
    block_size: int
    dtype: torch.dtype

    @property
    def layer_block_bytes(self) -> tuple[int, ...]:
        """Return the bytes of a block in each layer."""
        scale_bytes = SCALE_DTYPE.itemsize if self.dtype is torch.int8 else 0
        return tuple(
            2 * self.block_size * count * (head_dim * self.dtype.itemsize + scale_bytes)
            for count, head_dim in self.heads
        )

    @property
    def block_bytes(self) -> int:
        return sum(self.layer_block_bytes)

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


class KvParts(Protocol):
    """Memory of a cache on a CPU, which its owner may copy."""

    def parts(self) -> Sequence[Tensor]:
        """Contiguous tensors [num_blocks, ...]. A block is the rows with its number in all of them."""
        ...


def check_cache_dtype(backend: str, dtype: torch.dtype, known: Sequence[torch.dtype]) -> None:
    """Raises ConfigError that names the backend, the dtype, and the dtypes with kernels."""
    if dtype not in known:
        names = f"{', '.join(map(str, known[:-1]))} and {known[-1]}"
        raise ConfigError(
            f"the {backend} backend keeps keys and values in {names}; the KV cache is {dtype}".replace(
                "torch.", ""
            )
        )


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as a cache of this dtype stores it; x itself if it has that dtype. The oracle of kernels that store."""
    if dtype is not FP8:
        assert x.dtype is dtype, (x.dtype, dtype)
        return x
    # Not every version of torch saturates by itself.
    return x.float().clamp(-FP8_MAX, FP8_MAX).to(FP8)


def as_bytes(cache: Tensor) -> Tensor:
    """The cache as a tensor that can be indexed: not every device moves 8-bit floats by index."""
    return cache.view(torch.uint8) if cache.dtype is FP8 else cache


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
    """Return the exact values [..., D] float32 of codes [..., D] and scales [...]."""
    return codes.float() * scales.float()[..., None]
