"""Backend.rms_norm, gate and rope_append in one launch each. All arithmetic is in float32.

A norm's row stays in the registers of one program; as in the torch backend, the normalised number is rounded to
the type of the rows before the weight multiplies it. rope_append normalises and rotates heads, and stores keys and
values in the paged cache, whose layout is NHD: [blocks, block_size, Hkv, D] of keys and of values, so that the
channels of a token's head are contiguous. A slot is block * block_size + offset. Only Hkv heads are stored.
interface/kv_cache.stored defines the bits of a cache of 8-bit floats. Knows neither block tables nor attention.
"""

import torch
import triton.language as tl
from torch import Tensor

from faser.errors import EngineError
from faser.kernels.cuda.triton.common import (
    ACTIVATIONS,
    EXACT,
    activated,
    expect,
    expect_lines,
    jit,
    next_power_of_2,
    normalised,
    row_warps,
    saturated_code,
)
from faser.kernels.interface.fp8 import FP8
from faser.kernels.interface.shapes import AttentionShape
from faser.optional import or_else, present

HEAD_DIMS = (64, 128, 256, 512)
_BLOCK = 1024
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@jit
def _rms_norm(
    x, stride, weight, residual, residual_stride, scaled, out_stride, width, eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row, read once. The residual is added before the one rounding, and may be the output."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * stride + column, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    factors = tl.load(weight + column, mask=inside, other=0.0)
    squares = tl.sum(wide * wide)
    if HAS_RESIDUAL:
        factor = 1.0 / tl.sqrt(squares / width + eps)
        added = (wide * factor).to(value.dtype).to(tl.float32) * factors.to(tl.float32)
        added += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        found = added.to(value.dtype)
    else:
        found = normalised(value, squares, width, eps, factors)
    tl.store(scaled + row * out_stride + column, found, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, residual: Tensor | None = None) -> Tensor:
    """out[r] = x[r] / sqrt(mean(x[r]²) + eps) * weight (+ residual[r]). Returns out.

    x, out, residual: [R, D] float32, bfloat16 or float16, one type, each row contiguous; out may be x or residual.
    weight: [D] float32, or of the type of x.
    Raises EngineError that names the tensor that does not fit, and for rows wider than common.WIDEST_ROW.
    """
    rows, width = x.shape
    expect_lines("x", x, (rows, width), *_TYPES, like=x)
    expect("weight", weight, (width,), torch.float32, x.dtype, like=x)
    expect_lines("out", out, (rows, width), x.dtype, like=x)
    expect_lines("residual", residual, (rows, width), x.dtype, like=x)
    added = or_else(residual, out)
    warps = row_warps(width)
    if rows:
        _rms_norm[(rows,)](
            x, x.stride(0), weight, added, added.stride(0), out, out.stride(0), width, eps,
            HAS_RESIDUAL=residual is not None, BLOCK=next_power_of_2(width), num_warps=warps, **EXACT,
        )  # fmt: skip
    return out


@jit
def _gate_rows(gate_up, stride, gated_rows, out_stride, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Some columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * stride + width + column, mask=inside, other=0.0)
    found = activated(gate, up, ACTIVATION)
    tl.store(gated_rows + row * out_stride + column, found.to(gate.dtype), mask=inside)


def gate(gate_up: Tensor, out: Tensor, activation: str = "silu") -> Tensor:
    """out = activation(gate) * up. gate_up: [R, 2 F], gate then up; out: [R, F]. One type, each row contiguous.

    activation: one of ACTIVATIONS. Returns out. Raises EngineError that names the tensor that does not fit.
    """
    assert activation in ACTIVATIONS, activation
    rows, width = out.shape
    expect_lines("gate_up", gate_up, (rows, 2 * width), *_TYPES, like=out)
    expect_lines("out", out, (rows, width), gate_up.dtype, like=out)
    if rows:
        _gate_rows[(rows, -(-width // _BLOCK))](
            gate_up, gate_up.stride(0), out, out.stride(0), width, ACTIVATION=activation, BLOCK=_BLOCK, **EXACT
        )
    return out


@jit
def _rope_append(
    qkv, stride, angles, query_angles, positions, slots, keys, values, q_weight, k_weight, v_weight, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    NORMED: tl.constexpr, ROTATE: tl.constexpr, AS_FP8: tl.constexpr,
):  # fmt: skip
    """One head of one row. A row of slot NO_SLOT stores nothing. AS_FP8: keys and values are codes, uint8.

    NORMED: how many heads of a row are normalised, the first ones. NUM_KV_HEADS: 0: the row has queries alone.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, HALF)
    place = qkv + row * stride + head * 2 * HALF + channel
    first, second = tl.load(place), tl.load(place + HALF)
    kind = first.dtype
    if NORMED:
        weight = tl.where(head < NUM_HEADS, q_weight + channel, k_weight + channel)
        weight = tl.where(head < NUM_HEADS + NUM_KV_HEADS, weight, v_weight + channel)
        if head < NORMED:
            wide, other = first.to(tl.float32), second.to(tl.float32)
            mean = (tl.sum(wide * wide) + tl.sum(other * other)) / (2 * HALF)
            factor = 1.0 / tl.sqrt(mean + eps)
            factors, second_factors = tl.load(weight).to(tl.float32), tl.load(weight + HALF).to(tl.float32)
            first = ((wide * factor).to(kind).to(tl.float32) * factors).to(kind)
            second = ((other * factor).to(kind).to(tl.float32) * second_factors).to(kind)
    if ROTATE:
        place_of_angle = tl.load(positions + row) * 2 * HALF + channel
        if head < NUM_HEADS + NUM_KV_HEADS:
            angle = tl.where(head < NUM_HEADS, query_angles + place_of_angle, angles + place_of_angle)
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
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    query_angles: Tensor | None = None,
    v_norm: Tensor | None = None,
) -> Tensor:
    """Returns queries [R, Hq * D], a view of qkv; stores keys and values in the cache.

    qkv: [R, (Hq + 2 Hkv) * D] float32, bfloat16 or float16, each row contiguous; its queries are overwritten.
    angles, query_angles: [P, D] float32, as in Backend.rope_append; None rotates nothing. positions: [R] int64,
    below P. slots: [R] int64, distinct; NO_SLOT (flashinfer/paged_layout.py) stores nothing. keys, values:
    [blocks, block_size, Hkv, D] of one layer, contiguous, of the dtype of qkv or float8_e4m3fn. q_norm, k_norm,
    v_norm: [D] float32, or the dtype of qkv; each but the first one needs the one before it. Hkv is 0, in rows and
    cache, for a shape that reads another layer's keys.

    Raises EngineError that names the tensor that does not fit, or a head_dim outside HEAD_DIMS.
    """
    dim, num_kv = shape.head_dim, 0 if shape.reads_other else shape.num_kv_heads
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
    of_queries = or_else(query_angles, angles)
    if of_queries is not None:
        expect("query_angles", of_queries, (len(of_queries), dim), torch.float32, like=qkv)
        assert angles is not None, "query_angles without angles"
    assert k_norm is None or q_norm is not None, "k_norm without q_norm"
    assert v_norm is None or k_norm is not None, "v_norm without k_norm"
    weights = present((q_norm, k_norm, v_norm))
    for name, each in zip(("q_norm", "k_norm", "v_norm"), weights, strict=False):
        types = (torch.float32, qkv.dtype) if each is q_norm else (weights[0].dtype,)
        expect(name, each, (dim,), *types, like=qkv)
    normed = (0, shape.num_heads, shape.num_heads + num_kv, num_heads)[len(weights)]
    weights += [weights[0] if weights else qkv] * (3 - len(weights))  # never read
    as_fp8 = keys.dtype is FP8
    if as_fp8:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    if len(qkv):
        _rope_append[(len(qkv), num_heads)](
            qkv, qkv.stride(0), or_else(angles, qkv), or_else(of_queries, qkv),
            positions, slots, keys, values, *weights, eps,
            NUM_HEADS=shape.num_heads, NUM_KV_HEADS=num_kv, HALF=dim // 2, NORMED=normed,
            ROTATE=angles is not None, AS_FP8=as_fp8, num_warps=1, **EXACT,
        )  # fmt: skip
    return qkv[:, : shape.num_heads * dim]
