"""Random blocks of every low-bit format, and their dequantised values by the package gguf."""

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, quants

from faser.kernels.interface.low_bit.formats import FORMATS
from faser.kernels.interface.low_bit.rows import BlockRows, LowBitRows, block_rows

# Bytes of a block at which half floats lie: scales, and minimums.
_HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}


def random_blocks(name: str, rows: int, depth: int, *, seed: int = 0) -> LowBitRows:
    """Every code, scale and minimum is random; half floats are between a half and two percent, of either sign,
    and powers of two of that size."""
    rng = np.random.default_rng((seed, rows, depth))
    found = FORMATS[name]
    count = rows * depth // found.values
    blocks = rng.integers(0, 256, (count, found.num_bytes), np.uint8)
    for at in _HALVES[name]:
        sizes = rng.uniform(0.005, 0.02, count) * rng.choice([-1, 1], count)
        blocks[:, at : at + 2] = sizes.astype(np.float16)[:, None].view(np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(119, 124, count)
    return block_rows(name, blocks.reshape(rows, -1), depth)


def extreme_blocks(name: str, rows: int, depth: int, fill: int, *, seed: int = 0) -> LowBitRows:
    """The largest or the smallest codes and integer scales, now and then next to them.

    fill: a byte, of which the lowest bit is random. Half floats are those of random_blocks.
    """
    rng = np.random.default_rng((seed, fill))
    weight = random_blocks(name, rows, depth, seed=seed)
    part = weight.parts[0]
    assert isinstance(part, BlockRows)
    blocks = part.blocks.reshape(-1, part.format.num_bytes)
    halves = {at + byte for at in _HALVES[name] for byte in (0, 1)}
    others = [at for at in range(part.format.num_bytes) if at not in halves]
    blocks[:, others] = fill ^ rng.integers(0, 2, (len(blocks), len(others)), np.uint8)
    if name == "MXFP4":
        blocks[:, 0] = 121
    if name == "Q6_K":
        blocks[:, 192:208] ^= 0x80  # -128 or 127: signed bytes
    return weight


def by_gguf(weight: LowBitRows) -> npt.NDArray[np.float32]:
    """[N, K] float32, as llama.cpp's Python package reads the same blocks."""
    return np.concatenate(
        [
            np.asarray(quants.dequantize(part.blocks, GGMLQuantizationType(part.format.number)), np.float32)
            for part in weight.parts
            if isinstance(part, BlockRows)
        ]
    )
