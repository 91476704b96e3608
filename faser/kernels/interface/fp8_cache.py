"""Keys and values as 8-bit floats: what a cache of float8_e4m3fn stores, and the error that this causes.

The scale is one, so nothing is calibrated and no token depends on the others in its block: a number becomes the
nearest one of the type, ties to even; a magnitude above 448 becomes 448; a NaN stays a NaN. Queries, products and
sums keep their types.

The error, with x' stored for x and |x| <= 448: |x' - x| <= max(|x| / 16, 2**-10), half a unit in the last place of
a normal and of a subnormal number. For one row, let e be the largest change of a score: at most scale * sum over d
of |q| dk, with dk that bound of a key. Then at most tanh(e / 2) of the attention moves from some positions to
others; in the worst case two groups of positions have half of it each, and scores fall by e in one group and rise
by e in the other. So a component of the result is off by at most the largest dv of its values, plus tanh(e / 2)
times the distance between their largest and their least. For keys and values above 448 there is no bound.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from faser.errors import ConfigError
from faser.kernels.interface.fp8 import FP8, FP8_MAX


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


def check_cache_dtype(backend: str, dtype: torch.dtype, known: Sequence[torch.dtype]) -> None:
    """Raises ConfigError that names the backend, the dtype, and the dtypes with kernels."""
    if dtype not in known:
        names = f"{', '.join(map(str, known[:-1]))} and {known[-1]}"
        raise ConfigError(
            f"the {backend} backend keeps keys and values in {names}; the KV cache is {dtype}".replace(
                "torch.", ""
            )
        )
