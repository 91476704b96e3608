"""Layouts, inputs and an attention written out in loops, for the tests of every backend."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from faser.kernels.interface.backend import Backend
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.shapes import AttentionShape, KvCache, RowLayout

BLOCK_SIZE = 16
MAX_POSITIONS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Rows of one sequence in a step: positions start … start + rows - 1."""

    sequence: int
    start: int
    rows: int


def layout_of(spans: list[Span], block_table: Tensor) -> RowLayout:
    """block_table: [all sequences, B]; the layout holds the lines of the spans' sequences."""
    positions = torch.cat([torch.arange(span.start, span.start + span.rows) for span in spans])
    starts = torch.tensor([0] + [span.rows for span in spans]).cumsum(0)
    return RowLayout(
        query_start=starts.to(torch.int32),
        seq_len=torch.tensor([span.start + span.rows for span in spans], dtype=torch.int32),
        positions=positions.to(torch.int32),
        block_table=block_table[[span.sequence for span in spans]].contiguous(),
    )


def shuffled_table(num_sequences: int, blocks_each: int, seed: int = 0) -> Tensor:
    order = torch.randperm(num_sequences * blocks_each, generator=torch.Generator().manual_seed(seed))
    return order.to(torch.int32).view(num_sequences, blocks_each)


def kv_shape(
    shape: AttentionShape, num_blocks: int, dtype: torch.dtype, block_size: int = BLOCK_SIZE, num_layers: int = 2
) -> KvShape:
    return KvShape(
        heads=((shape.num_kv_heads, shape.head_dim),) * num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=dtype,
    )


def attention_shape(group: int, num_kv_heads: int, head_dim: int, window: int | None = None) -> AttentionShape:
    return AttentionShape(
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=1 / math.sqrt(head_dim),
        window=window,
    )


def qkv_width(shape: AttentionShape) -> int:
    return (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim


def rotary_angles(head_dim: int) -> Tensor:
    rates = 100.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    turns = torch.arange(MAX_POSITIONS)[:, None] * rates
    return torch.cat((turns.cos(), turns.sin()), -1).float()


def step(
    backend: Backend,
    cache: KvCache,
    shape: AttentionShape,
    layout: RowLayout,
    qkv: Tensor,
    angles: Tensor | None = None,
    block_size: int = BLOCK_SIZE,
    layer: int = 1,
    sinks: Tensor | None = None,
) -> Tensor:
    """One layer's append and attention of one step; qkv is not changed."""
    plan = backend.plan(layout, block_size)
    queries = backend.rope_append(qkv.clone(), angles, cache, layer, shape, plan)
    out = torch.full((len(qkv), shape.num_heads * shape.head_dim), math.nan, dtype=qkv.dtype)
    return backend.attend(queries, cache, layer, shape, plan, out, sinks=sinks)


def naive_attention(qkv: Tensor, shape: AttentionShape) -> Tensor:
    """Attention of a whole sequence over itself from the formula, one row and head at a time, in float64."""
    heads = qkv.double().view(len(qkv), -1, shape.head_dim)
    group = shape.num_heads // shape.num_kv_heads
    out = torch.zeros(len(qkv), shape.num_heads, shape.head_dim, dtype=torch.float64)
    for row in range(len(qkv)):
        first = 0 if shape.window is None else max(0, row - shape.window + 1)
        for head in range(shape.num_heads):
            keys = heads[first : row + 1, shape.num_heads + head // group]
            values = heads[first : row + 1, shape.num_heads + shape.num_kv_heads + head // group]
            out[row, head] = (keys @ heads[row, head] * shape.scale).softmax(0) @ values
    return out.view(len(qkv), -1)
