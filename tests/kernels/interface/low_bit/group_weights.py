"""Random weights of codes with scales, for the tests of low-bit products."""

import numpy as np

from faser.kernels.interface.low_bit.rows import LowBitRows, group_rows


def random_groups(
    bits: int,
    rows: int,
    depth: int,
    *,
    group_size: int,
    has_minimums: bool = False,
    dtype: type[np.floating] = np.float32,
    has_order: bool = False,
    seed: int = 0,
) -> LowBitRows:
    """Every code and factor is random. dtype: of the factors before they become float32."""
    rng = np.random.default_rng((seed, bits, rows, depth, group_size))
    size = (rows, depth // group_size)
    part = group_rows(
        rng.integers(0, 1 << bits, (rows, depth), np.uint8),
        bits=bits,
        zero_point=1 << bits - 1,
        scales=rng.uniform(0.005, 0.02, size).astype(dtype).astype(np.float32),
        minimums=rng.uniform(-0.1, 0.1, size).astype(dtype).astype(np.float32) if has_minimums else None,
    )
    return LowBitRows(parts=(part,), order=rng.permutation(depth).astype(np.int32) if has_order else None)
