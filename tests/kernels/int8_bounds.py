"""How far attention over keys and values in int8 may be off: the bounds in interface/kv_cache.py."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from faser.kernels.interface.kv_cache import dequantised, quantise_heads
from faser.kernels.interface.shapes import AttentionShape

_MOST_QUERY = 16256  # integers of a query, where a backend rounds it


def scale_bound(heads: Tensor) -> Tensor:
    """[...]: the largest scale that heads [..., D] may get."""
    return (heads.abs().amax(-1) * (1 + 2.0**-7) / 127).clamp(min=2.0**-126)


def stored_heads(qkv: Tensor, shape: AttentionShape) -> Tensor:
    """qkv with the keys and values that a cache in int8 gives back."""
    heads = qkv.float().view(len(qkv), -1, shape.head_dim).clone()
    heads[:, shape.num_heads :] = dequantised(*quantise_heads(heads[:, shape.num_heads :]))
    return heads.view(len(qkv), -1)


def most_off(
    qkv: Tensor, shape: AttentionShape, rows: Sequence[int], *, stores: bool = True, rounds: bool = False
) -> Tensor:
    """[rows, Hq * D]: bounds for these rows of one sequence.

    stores: with the error of storing; else from attention over the stored numbers. rounds: with that of queries
    and weights that are rounded to integers.
    """
    heads, group = qkv.double().view(len(qkv), -1, shape.head_dim), shape.num_heads // shape.num_kv_heads
    stored = stored_heads(qkv, shape).double().view_as(heads)
    out = torch.zeros(len(rows), shape.num_heads, shape.head_dim, dtype=torch.float64)
    for i, row in enumerate(rows):
        first = 0 if shape.window is None else max(0, row - shape.window + 1)
        for head in range(shape.num_heads):
            query = heads[row, head].abs()
            key = shape.num_heads + head // group
            keys, values = (stored[first : row + 1, at] for at in (key, key + shape.num_kv_heads))
            halves = [scale_bound(heads[first : row + 1, at]) / 2 for at in (key, key + shape.num_kv_heads)]
            change, moved = 0.0, 0.0
            if stores:
                change += float((halves[0] * query.sum()).max())
                moved += float(halves[1].max())
            if rounds:
                change += float(keys.abs().sum(-1).max() * query.max() / (2 * _MOST_QUERY))
                moved += float(halves[1].max())
            distance = values.amax(0) - values.amin(0)
            if stores:
                distance = distance + 2 * halves[1].max()
            out[i, head] = moved + math.tanh(shape.scale * change / 2) * distance
    return out.view(len(rows), -1)
