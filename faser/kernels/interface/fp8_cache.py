"""Keys and values stored as 8-bit floats: what a cache of float8_e4m3fn holds, and how far off attention is then.

Their scale is one, so nothing is calibrated and nothing depends on who else is in a block: a number becomes the
nearest one of the type, ties to even; what is beyond 448 becomes 448; what is no number stays none. Queries,
products and sums keep their types.

How far off, with x' for x and |x| <= 448: |x' - x| <= max(|x| / 16, 2**-10), half a unit in the last place of a
normal and of a subnormal number. Of one row, let e be the largest change of a score, at most scale * sum over d of
|q| dk with dk that bound of a key. Then no more than tanh(e / 2) of the attention moves from some positions to
others: in the worst case scores fall by e at some of them and rise by e at the others, which had evenly shared it
halfway. So a component of the result is off by no more than the largest dv of its values, plus tanh(e / 2) times
the distance between their largest and their least. Where keys and values are beyond 448 nothing is promised.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from faser.errors import ConfigError
from faser.kernels.interface.fp8 import FP8, FP8_MAX


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as a cache of this type holds it: x itself where it has that type. Oracle of all kernels that store."""
    if dtype is not FP8:
        assert x.dtype is dtype, (x.dtype, dtype)
        return x
    # Not every version of torch saturates by itself.
    return x.float().clamp(-FP8_MAX, FP8_MAX).to(FP8)


def rounding(x: Tensor) -> Tensor:
    """How far `stored` may be off, float32; for |x| <= 448."""
    return (x.float().abs() / 16).clamp_min(2.0**-10)


def as_bytes(cache: Tensor) -> Tensor:
    """The same numbers as something that can be copied: not every device moves 8-bit floats by index."""
    return cache.view(torch.uint8) if cache.dtype is FP8 else cache


def check_cache_dtype(backend: str, dtype: torch.dtype, known: Sequence[torch.dtype]) -> None:
    """Raises ConfigError naming the backend, the type and those it has kernels for."""
    if dtype not in known:
        names = " and ".join(map(str, known))
        raise ConfigError(
            f"the {backend} backend keeps keys and values in {names}; the KV cache is {dtype}".replace(
                "torch.", ""
            )
        )
