"""Layers for few rows: rotation, storing, attention and the joining of its pieces are one launch, where faster.

Measured, like the products, when a shape of attention is first needed for so many rows: over a cache of its own,
in which every sequence is _CONTEXT tokens long. Separate launches keep what the kernel does not compute: keys of
another layer, caches in 8 bits, larger heads, more queries of a sequence and KV head than one of its tiles holds.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from faser.kernels.cuda.choices import Choices
from faser.kernels.cuda.flashinfer.device_kernels import FewRowAttention
from faser.kernels.cuda.flashinfer.few_row_blocks import MOST_ROWS
from faser.kernels.cuda.flashinfer.paged_layout import PagedLayout
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.blocks import Blocks, DecoderLayer
from faser.kernels.interface.forward import SeparateLayers
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.shapes import AttentionPlan, AttentionShape, KvCache, RowLayout

_SEPARATE, _IN_ONE = "separate", "one launch"
_CONTEXT = 1024
_TOLERANCE = 2.0**-5  # of the largest value: roundings of bfloat16 in other places


class Plan(Protocol):
    """A plan of this backend. most_rows_each: of any sequence."""

    device: PagedLayout
    block_size: int

    @property
    def most_rows_each(self) -> int: ...


class PagedCache(Protocol):
    """A cache of this backend: keys and values of each layer."""

    layers: tuple[tuple[Tensor, Tensor], ...]


class FewRowLayers(SeparateLayers):
    """Layers whose attention of few rows is one launch where that was measured to be faster."""

    def __init__(self, backend: Backend, blocks: Blocks, attention: FewRowAttention, choices: Choices) -> None:
        super().__init__(backend, blocks)
        self._attention, self._choices = attention, choices
        self._is_faster: dict[tuple[object, ...], bool] = {}

    def _append_and_attend(
        self,
        layer: DecoderLayer,
        shape: AttentionShape,
        number: int,
        qkv: Tensor,
        cache: KvCache,
        plan: AttentionPlan,
        mixed: Tensor,
    ) -> None:
        is_own = layer.kv_layer is None and layer.lent is None and not shape.reads_other
        if is_own and len(qkv) <= MOST_ROWS and self._in_one(layer, shape, number, qkv, cache, plan):
            self._attention(layer, shape, qkv, cache.layers[number], plan.device, plan.most_rows_each, mixed)
        else:
            super()._append_and_attend(layer, shape, number, qkv, cache, plan, mixed)

    def _in_one(
        self, layer: DecoderLayer, shape: AttentionShape, number: int, qkv: Tensor, cache: PagedCache, plan: Plan
    ) -> bool:
        sequences, rows_each, dtype = len(plan.device.seq_len), plan.most_rows_each, cache.layers[number][0].dtype
        if sequences > MOST_ROWS or dtype is not qkv.dtype or not self._attention.takes(shape, rows_each):
            return False
        norms = sum(each is not None for each in (layer.q_norm, layer.k_norm, layer.v_norm))
        known = (shape, norms, layer.sinks is None, len(qkv), sequences, rows_each, dtype)
        if known not in self._is_faster:
            key = f"attention {', '.join(map(str, known))}"
            ways = self._ways(layer, shape, qkv, sequences, rows_each, plan.block_size)
            self._is_faster[known] = self._choices.fastest(key, ways, tolerance=_TOLERANCE) == _IN_ONE
        return self._is_faster[known]

    def _ways(
        self,
        layer: DecoderLayer,
        shape: AttentionShape,
        qkv: Tensor,
        sequences: int,
        rows_each: int,
        block_size: int,
    ) -> dict[str, Callable[[], Tensor]]:
        """Both ways of a step over a cache of random numbers, as many rows in all as qkv has."""
        context = _CONTEXT if layer.angles is None else min(_CONTEXT, len(layer.angles))
        blocks = -(-context // block_size)
        kv = KvShape(
            heads=((shape.num_kv_heads, shape.head_dim),),
            num_blocks=sequences * blocks,
            block_size=block_size,
            dtype=qkv.dtype,
        )
        cache = self._backend.allocate_kv(kv)
        for each in cache.layers[0]:
            each.normal_()
        plan = self._backend.plan(_step(len(qkv), sequences, rows_each, context, blocks), block_size)
        rows = torch.randn(qkv.shape, dtype=torch.float32, device=qkv.device).to(qkv.dtype)
        width = shape.q_size

        def way(run: Callable[..., None]) -> Tensor:
            out = rows.new_empty((len(rows), width))
            run(rows.clone(), cache, plan, out)  # of both ways, since one of them changes it
            return out

        def in_one(rows: Tensor, cache: PagedCache, plan: Plan, out: Tensor) -> None:
            self._attention(layer, shape, rows, cache.layers[0], plan.device, rows_each, out)

        separate = partial(super()._append_and_attend, layer, shape, 0)
        return {_SEPARATE: partial(way, separate), _IN_ONE: partial(way, in_one)}


def _step(rows: int, sequences: int, rows_each: int, context: int, blocks: int) -> RowLayout:
    """So many rows of sequences of one length, spread evenly; sequences may be left without rows."""
    counts = np.zeros(sequences, dtype=np.int32)
    for sequence in range(sequences):
        left, others = rows - int(counts.sum()), sequences - sequence - 1
        counts[sequence] = min(rows_each, max(left - others, -(-left // (others + 1))))
    starts = np.concatenate(([0], counts.cumsum())).astype(np.int32)
    positions = [np.arange(context - count, context, dtype=np.int32) for count in counts]
    return RowLayout(
        query_start=torch.from_numpy(starts),
        seq_len=torch.full((sequences,), context, dtype=torch.int32),
        positions=torch.from_numpy(np.concatenate(positions)),
        block_table=torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks),
    )
