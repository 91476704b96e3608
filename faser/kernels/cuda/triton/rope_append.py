"""Normalise, rotate and store: queries in place, keys and values into a paged cache, in one launch per layer.

The layout is NHD: [blocks, block_size, Hkv, D] of keys and of values, so that a token's head lies in line. A slot
is block * block_size + offset; see Backend.rope_append, of which this is the arithmetic. Grouped queries need
nothing: only Hkv heads are stored. A cache of 8-bit floats gets what kernels/fp8_cache.stored says. Knows nothing
of block tables and of attention.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from faser.errors import EngineError
from faser.kernels.cuda.triton.common.float8 import saturated_code
from faser.kernels.cuda.triton.common.tensors import EXACT, expect, expect_lines, jit
from faser.kernels.interface.backend import AttentionShape
from faser.kernels.interface.fp8 import FP8

HEAD_DIMS = (64, 128)
NO_SLOT = -1

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm:
    """RMS norm of each head before it is rotated. q_weight, k_weight: [D], of the type of qkv."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


@jit
def _rope_append(
    qkv, stride, angles, positions, slots, keys, values, q_weight, k_weight, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr, ROTATE: tl.constexpr, AS_FP8: tl.constexpr,
):  # fmt: skip
    """One head of one row. A row whose slot is NO_SLOT stores nothing. AS_FP8: keys, values are codes, uint8."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, HALF)
    place = qkv + row * stride + head * 2 * HALF + channel
    first, second = tl.load(place), tl.load(place + HALF)
    kind = first.dtype
    if head < NUM_HEADS + NUM_KV_HEADS:
        if NORM:
            wide, other = first.to(tl.float32), second.to(tl.float32)
            mean = (tl.sum(wide * wide) + tl.sum(other * other)) / (2 * HALF)
            factor = 1.0 / tl.sqrt(mean + eps)
            weight = tl.where(head < NUM_HEADS, tl.load(q_weight + channel), tl.load(k_weight + channel))
            behind = tl.where(
                head < NUM_HEADS, tl.load(q_weight + HALF + channel), tl.load(k_weight + HALF + channel)
            )
            first = ((wide * factor).to(kind).to(tl.float32) * weight.to(tl.float32)).to(kind)
            second = ((other * factor).to(kind).to(tl.float32) * behind.to(tl.float32)).to(kind)
        if ROTATE:
            angle = angles + tl.load(positions + row) * 2 * HALF + channel
            cosine, sine = tl.load(angle), tl.load(angle + HALF)
            wide, other = first.to(tl.float32), second.to(tl.float32)
            first = (wide * cosine - other * sine).to(kind)
            second = (other * cosine + wide * sine).to(kind)
    if head < NUM_HEADS:
        tl.store(place, first)
        tl.store(place + HALF, second)
    else:
        slot = tl.load(slots + row)
        if slot >= 0:
            if head < NUM_HEADS + NUM_KV_HEADS:
                target = keys + (slot * NUM_KV_HEADS + head - NUM_HEADS) * 2 * HALF + channel
            else:
                target = values + (slot * NUM_KV_HEADS + head - NUM_HEADS - NUM_KV_HEADS) * 2 * HALF + channel
            if AS_FP8:
                tl.store(target, saturated_code(first.to(tl.float32)).to(tl.uint8))
                tl.store(target + HALF, saturated_code(second.to(tl.float32)).to(tl.uint8))
            else:
                tl.store(target, first)
                tl.store(target + HALF, second)


def rope_append(
    qkv: Tensor,
    angles: Tensor | None,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    shape: AttentionShape,
    norm: HeadNorm | None = None,
) -> Tensor:
    """Returns queries [R, Hq * D], a view of qkv; keys and values are in the cache.

    qkv: [R, (Hq + 2 Hkv) * D] float32, bfloat16 or float16, rows in line; its queries are overwritten. angles: [P,
    D] float32, see Backend.rope_append; None rotates nothing. positions: [R] int64, below P. slots: [R] int64,
    distinct; NO_SLOT stores nothing. keys, values: [blocks, block_size, Hkv, D] of one layer, of the type of qkv
    or float8_e4m3fn. Raises EngineError, also for a head_dim that is not one of HEAD_DIMS.
    """
    dim, num_kv = shape.head_dim, shape.num_kv_heads
    if dim not in HEAD_DIMS:
        raise EngineError(f"head_dim is {dim}; rope_append has kernels for {HEAD_DIMS}")
    num_heads = shape.num_heads + 2 * num_kv
    expect_lines("qkv", qkv, (len(qkv), num_heads * dim), *_TYPES, like=qkv)
    for name, each in (("positions", positions), ("slots", slots)):
        expect(name, each, (len(qkv),), torch.int64, like=qkv)
    size = (*keys.shape[:2], num_kv, dim)
    expect("keys", keys, size, qkv.dtype, FP8, like=qkv)
    expect("values", values, size, keys.dtype, like=qkv)
    if angles is not None:
        expect("angles", angles, (len(angles), dim), torch.float32, like=qkv)
    if norm is not None:
        expect("q_weight", norm.q_weight, (dim,), qkv.dtype, like=qkv)
        expect("k_weight", norm.k_weight, (dim,), qkv.dtype, like=qkv)
    as_fp8 = keys.dtype is FP8
    if as_fp8:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    if len(qkv):
        weights = (qkv, qkv, 0.0) if norm is None else (norm.q_weight, norm.k_weight, norm.eps)
        _rope_append[(len(qkv), num_heads)](
            qkv, qkv.stride(0), qkv if angles is None else angles, positions, slots, keys, values, *weights,
            NUM_HEADS=shape.num_heads, NUM_KV_HEADS=num_kv, HALF=dim // 2, NORM=norm is not None,
            ROTATE=angles is not None, AS_FP8=as_fp8, num_warps=1, **EXACT,
        )  # fmt: skip
    return qkv[:, : shape.num_heads * dim]
