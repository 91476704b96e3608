"""Attention of at most MOST_ROWS rows in one launch, with rotation, storing, and the joining of pieces.

A program has a sequence, a KV head and a piece: of every PIECES granules of GRANULE positions it reads one, and

    appends   those new rows that lie in its granules, so that no program reads a key that another one writes
    attends   with all query heads of its KV head, and leaves what it found as float32
    joins     all pieces of its sequence and head, in their order, if it is the last one that arrives

Which granules a row's keys lie in, and in which order they are added up, follows from their positions alone, and
what a row must not see adds zero: so its bits do not depend on the other rows, on their number, or on how much
longer the sequence is. There is no plan: lengths and pages are read on the device.
"""

import math
from typing import Protocol

import torch
import triton.language as tl
from torch import Tensor

from faser.errors import EngineError
from faser.kernels.cuda.triton.common import EXACT, expect, expect_lines, jit, next_power_of_2
from faser.kernels.cuda.triton.few_rows import MOST_ROWS, dependent, wait_for_launch_before
from faser.kernels.interface.blocks import DecoderLayer
from faser.kernels.interface.shapes import AttentionShape

HEAD_DIMS = (64, 128, 256)
MOST_QUERIES = 32  # of a sequence and a KV head; for more the tensor cores would add up in another order
_LEAST_QUERIES = 16  # that the tensor cores take
_GRANULE = 64
_PROGRAMS = 128  # of one sequence: about as many as a GPU has processors
_MOST_PIECES = 32
_LOG2_E = tl.constexpr(math.log2(math.e))
_TYPES = (torch.bfloat16, torch.float16)


class Layout(Protocol):
    """Index arrays of a step on the device; see flashinfer/paged_layout.py."""

    @property
    def query_indptr(self) -> Tensor: ...
    @property
    def page_indptr(self) -> Tensor: ...
    @property
    def page_indices(self) -> Tensor: ...
    @property
    def seq_len(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def slots(self) -> Tensor: ...


def num_pieces(num_kv_heads: int) -> int:
    """Return into how many pieces each sequence is cut, whatever the step."""
    return min(next_power_of_2(max(_PROGRAMS // num_kv_heads, 1)), _MOST_PIECES)


class FewRowWorkspace:
    """Holds what pieces leave for their joining, and how many have arrived, for layers of one shape.

    pieces: of every sequence, a power of two; None: num_pieces.
    """

    def __init__(self, shape: AttentionShape, device: torch.device, pieces: int | None = None) -> None:
        queries, self.pieces = MOST_ROWS * shape.num_heads, pieces or num_pieces(shape.num_kv_heads)
        self.mixed = torch.empty((queries, self.pieces, shape.head_dim), dtype=torch.float32, device=device)
        self.sums = torch.empty((queries, self.pieces, 2), dtype=torch.float32, device=device)
        self.arrived = torch.zeros(MOST_ROWS * shape.num_kv_heads, dtype=torch.int32, device=device)


@jit
def _prepared(
    place, inside, angle, weight, eps, HALF: tl.constexpr, NORMED: tl.constexpr, ROTATE: tl.constexpr
):  # fmt: skip
    """Both halves of heads, normalised and rotated as in layer_ops. place, angle: [N, 1]; inside: [N]."""
    channel = tl.arange(0, HALF)[None, :]
    first = tl.load(place + channel, mask=inside[:, None], other=0.0)
    second = tl.load(place + HALF + channel, mask=inside[:, None], other=0.0)
    kind = first.dtype
    if NORMED:
        wide, other = first.to(tl.float32), second.to(tl.float32)
        mean = (tl.sum(wide * wide, 1) + tl.sum(other * other, 1)) / (2 * HALF)
        factor = (1.0 / tl.sqrt(mean + eps))[:, None]
        factors, second_factors = tl.load(weight + channel), tl.load(weight + HALF + channel)
        first = ((wide * factor).to(kind).to(tl.float32) * factors.to(tl.float32)).to(kind)
        second = ((other * factor).to(kind).to(tl.float32) * second_factors.to(tl.float32)).to(kind)
    if ROTATE:
        cosine = tl.load(angle + channel, mask=inside[:, None], other=0.0)
        sine = tl.load(angle + HALF + channel, mask=inside[:, None], other=0.0)
        wide, other = first.to(tl.float32), second.to(tl.float32)
        first = (wide * cosine - other * sine).to(kind)
        second = (other * cosine + wide * sine).to(kind)
    return first, second


@jit
def _store_halves(target, first, second, inside, HALF: tl.constexpr):
    channel = tl.arange(0, HALF)[None, :]
    tl.store(target + channel, first, mask=inside[:, None])
    tl.store(target + HALF + channel, second, mask=inside[:, None])


@jit
def _append(
    qkv, stride, angles, positions, slots, keys, values, k_weight, v_weight, eps, first_row, head, mine,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr,
    ROTATE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Keys and values of the rows of `mine` into the cache. mine: [ROWS], of the sequence's rows."""
    row = (first_row + tl.arange(0, ROWS)).to(tl.int64)
    slot = tl.load(slots + row, mask=mine, other=-1)
    stored = mine & (slot >= 0)
    place = (qkv + row * stride + (NUM_HEADS + head) * 2 * HALF)[:, None]
    angle = (angles + tl.load(positions + row, mask=mine, other=0) * 2 * HALF)[:, None]
    target = ((slot * NUM_KV_HEADS + head) * 2 * HALF)[:, None]
    first, second = _prepared(place, mine, angle, k_weight, eps, HALF, NORMED >= 2, ROTATE)
    _store_halves(keys + target, first, second, stored, HALF)
    place += NUM_KV_HEADS * 2 * HALF
    first, second = _prepared(place, mine, angle, v_weight, eps, HALF, NORMED >= 3, False)
    _store_halves(values + target, first, second, stored, HALF)


@jit
def _product(one, other, WIDE: tl.constexpr):
    """one @ other.T, float32. WIDE: widen the factors first: the interpreter multiplies no bfloat16."""
    if WIDE:
        one, other = one.to(tl.float32), other.to(tl.float32)
    return tl.dot(one, tl.trans(other), input_precision="ieee")


@jit
def _weighted(weights, values, sums, WIDE: tl.constexpr):
    """sums + weights @ values, float32, with weights rounded to the type of the values."""
    weights = weights.to(values.dtype)
    if WIDE:
        weights, values = weights.to(tl.float32), values.to(tl.float32)
    return tl.dot(weights, values, sums, input_precision="ieee")


@jit
def _few_row_attention(
    qkv, stride, angles, query_angles, positions, slots, query_indptr, page_indptr, page_indices, seq_len,
    keys, values, q_weight, k_weight, v_weight, sinks, eps, scale, cap, window, mixed, sums, arrived, out,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, NORMED: tl.constexpr,
    ROTATE: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr, PIECES: tl.constexpr,
    GRANULE: tl.constexpr, PAGE: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    SINKS: tl.constexpr, WIDE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One piece. NORMED: queries, keys, values: how many of the three are normalised.

    scale: with the factor that turns exp into exp2, but where scores are capped.
    """
    if DEPENDENT:
        wait_for_launch_before()
    sequence, head, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    first_row = tl.load(query_indptr + sequence)
    num_rows = tl.load(query_indptr + sequence + 1) - first_row
    length = tl.load(seq_len + sequence)
    start = length - num_rows  # position of the first new row
    low = 0
    if WINDOWED:
        low = tl.maximum(start - window + 1, 0) // GRANULE
    high = tl.cdiv(length, GRANULE)
    begin = low + (piece + PIECES - low % PIECES) % PIECES
    if (num_rows > 0) & (begin < high):
        place = tl.arange(0, ROWS)
        mine = (place < num_rows) & ((start + place) // GRANULE % PIECES == piece)
        if tl.max(mine.to(tl.int32)) > 0:
            _append(
                qkv, stride, angles, positions, slots, keys, values, k_weight, v_weight, eps, first_row, head,
                mine, NUM_HEADS, NUM_KV_HEADS, HALF, NORMED, ROTATE, ROWS,
            )  # fmt: skip
            tl.debug_barrier()
        query = tl.arange(0, QUERIES)
        number = query // GROUP
        real = number < num_rows
        row = (first_row + number).to(tl.int64)
        query_head = head * GROUP + query % GROUP
        angle = (query_angles + tl.load(positions + row, mask=real, other=0) * 2 * HALF)[:, None]
        source = (qkv + row * stride + query_head * 2 * HALF)[:, None]
        q_first, q_second = _prepared(source, real, angle, q_weight, eps, HALF, NORMED >= 1, ROTATE)
        last = start + number  # position that each query sees last
        pages = page_indices + tl.load(page_indptr + sequence)
        most = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        first_mixed = tl.zeros((QUERIES, HALF), tl.float32)
        second_mixed = tl.zeros((QUERIES, HALF), tl.float32)
        channel = tl.arange(0, HALF)[None, :]
        for granule in tl.range(begin, high, PIECES):
            position = granule * GRANULE + tl.arange(0, GRANULE)
            inside = position < length
            page = tl.load(pages + position // PAGE, mask=inside, other=0).to(tl.int64)
            token = (((page * PAGE + position % PAGE) * NUM_KV_HEADS + head) * 2 * HALF)[:, None] + channel
            read = inside[:, None]
            scores = _product(q_first, tl.load(keys + token, mask=read, other=0.0), WIDE)
            scores += _product(q_second, tl.load(keys + token + HALF, mask=read, other=0.0), WIDE)
            scores *= scale
            if CAPPED:
                scores = cap * _LOG2_E * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (2.0 * _LOG2_E) / cap)))
            seen = real[:, None] & (position[None, :] <= last[:, None])
            if WINDOWED:
                seen = seen & (position[None, :] > last[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
            new_most = tl.maximum(most, tl.max(scores, 1))
            base = tl.where(new_most > float("-inf"), new_most, 0.0)
            faded = tl.exp2(most - base)
            weights = tl.exp2(scores - base[:, None])
            total = total * faded + tl.sum(weights, 1)
            first_values = tl.load(values + token, mask=read, other=0.0)
            second_values = tl.load(values + token + HALF, mask=read, other=0.0)
            first_mixed = _weighted(weights, first_values, first_mixed * faded[:, None], WIDE)
            second_mixed = _weighted(weights, second_values, second_mixed * faded[:, None], WIDE)
            most = new_most
        slot = (row * NUM_HEADS + query_head) * PIECES
        _store_halves(mixed + ((slot + piece) * 2 * HALF)[:, None], first_mixed, second_mixed, real, HALF)
        tl.store(sums + (slot + piece) * 2, most, mask=real)
        tl.store(sums + (slot + piece) * 2 + 1, total, mask=real)
        tl.debug_barrier()
        counter = arrived + sequence * NUM_KV_HEADS + head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == tl.minimum(PIECES, high - low) - 1:
            tl.store(counter, 0)  # for the next launch
            each = tl.arange(0, PIECES)
            used = (each + PIECES - low % PIECES) % PIECES < high - low
            left = real[:, None] & used[None, :]
            at = sums + (slot[:, None] + each[None, :]) * 2
            pieces_most = tl.load(at, mask=left, other=float("-inf"), cache_modifier=".cg")
            best = tl.max(pieces_most, 1)
            if SINKS:
                sink = tl.load(sinks + query_head).to(tl.float32) * _LOG2_E
                best = tl.maximum(best, sink)
            best = tl.where(best > float("-inf"), best, 0.0)
            shares = tl.exp2(pieces_most - best[:, None])
            whole = tl.sum(shares * tl.load(at + 1, mask=left, other=0.0, cache_modifier=".cg"), 1)
            if SINKS:
                whole += tl.exp2(sink - best)
            first_mixed = tl.zeros((QUERIES, HALF), tl.float32)
            second_mixed = tl.zeros((QUERIES, HALF), tl.float32)
            for joined in tl.range(0, PIECES):
                share = tl.sum(tl.where(each[None, :] == joined, shares, 0.0), 1)[:, None]
                part = mixed + ((slot + joined) * 2 * HALF)[:, None] + channel
                there = real[:, None] & ((joined + PIECES - low % PIECES) % PIECES < high - low)
                first_mixed += share * tl.load(part, mask=there, other=0.0, cache_modifier=".cg")
                second_mixed += share * tl.load(part + HALF, mask=there, other=0.0, cache_modifier=".cg")
            target = out + ((row * NUM_HEADS + query_head) * 2 * HALF)[:, None]
            whole = tl.where(real, whole, 1.0)[:, None]
            kind = out.dtype.element_ty
            _store_halves(target, (first_mixed / whole).to(kind), (second_mixed / whole).to(kind), real, HALF)


def few_row_attention(
    qkv: Tensor,
    angles: Tensor | None,
    layout: Layout,
    rows_each: int,
    keys: Tensor,
    values: Tensor,
    shape: AttentionShape,
    workspace: FewRowWorkspace,
    out: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    v_norm: Tensor | None = None,
    eps: float = 1e-6,
    query_angles: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """out = attention of the rows, after rope_append of their keys and values; see layer_ops and Backend.attend.

    qkv, out: [R, …] bfloat16 or float16, R at most MOST_ROWS; qkv stays as it is. layout: on the device.
    rows_each: most rows of a sequence; times the query heads of a KV head at most MOST_QUERIES. keys, values: of
    the type of qkv, [blocks, block_size, Hkv, D]. workspace: of this shape; launches that share it must not
    overlap. Returns out. Raises EngineError that names the tensor that does not fit, or a head_dim outside
    HEAD_DIMS.
    """
    dim, group = shape.head_dim, shape.num_heads // shape.num_kv_heads
    assert not shape.reads_other, "reads another layer's keys"
    assert len(qkv) <= MOST_ROWS, len(qkv)
    assert len(layout.seq_len) <= MOST_ROWS, len(layout.seq_len)
    assert rows_each * group <= MOST_QUERIES, (rows_each, group)
    if dim not in HEAD_DIMS:
        raise EngineError(f"head_dim is {dim}; few_row_attention has kernels for {HEAD_DIMS}")
    expect_lines("qkv", qkv, (len(qkv), (shape.num_heads + 2 * shape.num_kv_heads) * dim), *_TYPES, like=qkv)
    expect("keys", keys, (*keys.shape[:2], shape.num_kv_heads, dim), qkv.dtype, like=qkv)
    expect("values", values, tuple(keys.shape), qkv.dtype, like=qkv)
    expect("out", out, (len(qkv), shape.q_size), qkv.dtype, like=qkv)
    for name, each in (("angles", angles), ("query_angles", query_angles)):
        if each is not None:
            expect(name, each, (len(each), dim), torch.float32, like=qkv)
    weights = [each for each in (q_norm, k_norm, v_norm) if each is not None]
    normed = len(weights)
    assert all(each is not None for each in (q_norm, k_norm, v_norm)[:normed]), "a norm without the one before it"
    for each in weights:
        expect("a norm of heads", each, (dim,), torch.float32, qkv.dtype, like=qkv)
    weights += [qkv] * (3 - normed)  # never read
    turned = qkv if angles is None else angles
    _few_row_attention[(len(layout.seq_len), shape.num_kv_heads, workspace.pieces)](
        qkv, qkv.stride(0), turned, turned if query_angles is None else query_angles, layout.positions,
        layout.slots, layout.query_indptr, layout.page_indptr, layout.page_indices, layout.seq_len,
        keys, values, *weights,
        qkv if sinks is None else sinks, eps, shape.scale * (1.0 if shape.score_cap else math.log2(math.e)),
        shape.score_cap or 0.0, shape.window or 0, workspace.mixed, workspace.sums, workspace.arrived, out,
        NUM_HEADS=shape.num_heads, NUM_KV_HEADS=shape.num_kv_heads, HALF=dim // 2, NORMED=normed,
        ROTATE=angles is not None, ROWS=next_power_of_2(rows_each),
        QUERIES=max(next_power_of_2(rows_each * group), _LEAST_QUERIES), PIECES=workspace.pieces,
        GRANULE=_GRANULE, PAGE=keys.shape[1], CAPPED=shape.score_cap is not None,
        WINDOWED=shape.window is not None, SINKS=sinks is not None, WIDE=not qkv.is_cuda, DEPENDENT=qkv.is_cuda,
        num_warps=4, **dependent(qkv), **EXACT,
    )  # fmt: skip
    return out


class FewRowAttention:
    """Calls few_row_attention for the layers of one backend, whose launches never overlap."""

    def __init__(self) -> None:
        self._workspaces: dict[tuple[int, int, int], FewRowWorkspace] = {}

    def takes(self, shape: AttentionShape, rows_each: int) -> bool:
        """Return whether the kernel computes such attention of sequences with so many rows."""
        return shape.head_dim in HEAD_DIMS and rows_each * (shape.num_heads // shape.num_kv_heads) <= MOST_QUERIES

    def __call__(
        self,
        layer: DecoderLayer,
        shape: AttentionShape,
        qkv: Tensor,
        pages: tuple[Tensor, Tensor],
        layout: Layout,
        rows_each: int,
        out: Tensor,
    ) -> None:
        """out = attention of the rows of qkv. pages: keys and values of the layer."""
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        if heads not in self._workspaces:
            self._workspaces[heads] = FewRowWorkspace(shape, qkv.device)
        few_row_attention(
            qkv,
            layer.angles,
            layout,
            rows_each,
            *pages,
            shape,
            self._workspaces[heads],
            out,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            v_norm=layer.v_norm,
            eps=layer.eps,
            query_angles=layer.query_angles,
            sinks=layer.sinks,
        )
