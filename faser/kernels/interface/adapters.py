"""Low-rank additions to products, by row: LoRA (arXiv:2106.09685), with adapters of several requests in one step.

    out[r] = W x[r] + up[s] (down[s] x[r])        s: the adapter slot of row r; below 0: nothing is added

A step whose rows have no adapter runs the layers that know none, so adapters cost it nothing. Rows stand by
sequence, and all rows of a sequence have one adapter. The bits of a row do not depend on the adapters of other
rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from faser.errors import ConfigError
from faser.kernels.interface.shapes import PackedLinear, RowLayout
from faser.types.arrays import Ints

# Opaque handles of a backend: room for the adapters of one product; one adapter packed for one product; the
# adapters of the rows of a step.
AdapterRoom = Any
PackedAdapter = Any
AdapterRows = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """Addition of an adapter to one part of a product. down: [r, K]; up: [N, r], with the scale; any floats."""

    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class AdaptedLinear:
    """A product that adapters may change. base: the product of all rows. room: of the adapters in use."""

    base: PackedLinear
    room: AdapterRoom


def base_of(product: PackedLinear) -> PackedLinear:
    """Return the product of all rows, of one that adapters may change or not."""
    return product.base if isinstance(product, AdaptedLinear) else product


class Adapters(Protocol):
    """Kernels of a backend for adapters."""

    def room(
        self, parts: tuple[int, ...], depth: int, dtype: torch.dtype, *, slots: int, max_rank: int
    ) -> AdapterRoom:
        """Make room for `slots` adapters of a product [N, depth], none of which is set. dtype: of activations.

        parts: columns of each part of the product, which add up to N: a product of queries, keys and values has
        three, and an adapter may leave some of them as they are. max_rank: the most rows of a LowRank.down.
        """
        ...

    def pack(self, room: AdapterRoom, parts: tuple[LowRank | None, ...]) -> PackedAdapter:
        """Pack an adapter of a product, in any thread, also while steps run. None: that part stays as it is.

        Raises ConfigError for a rank above max_rank.
        """
        ...

    def set(self, room: AdapterRoom, slot: int, packed: PackedAdapter | None) -> None:
        """Put a packed adapter into a slot, between steps; None: empty it."""
        ...

    def rows(self, layout: RowLayout) -> AdapterRows | None:
        """Digest whose rows have which adapter, once per step; None: no row has one. Copies what it keeps."""
        ...

    def rows_at(self, slots: Tensor) -> AdapterRows:
        """The rows of a step that a CUDA graph runs; only of a backend that captures graphs.

        slots: [R] int64 on the device, read when the graph is replayed: of each row's adapter; below 0: none.
        """
        ...

    def add(self, x: Tensor, room: AdapterRoom, out: Tensor, rows: AdapterRows) -> None:
        """out[r] += up (down x[r]), with the adapter of row r. x: [R, K]; out: [R, N], in x's type or float32.

        Between the two products numbers are rounded to the type of x. A row whose slot is empty stays as it is.
        """
        ...


class AdapterRun(NamedTuple):
    """Rows begin … end - 1 have the adapter in this slot."""

    slot: int
    begin: int
    end: int


def adapter_runs(layout: RowLayout) -> list[AdapterRun]:
    """Return the rows that have adapters, in their order; neighbours with one adapter are one run."""
    if layout.adapters is None:
        return []
    slots, starts = layout.adapters.numpy(), layout.query_start.numpy()
    first = np.flatnonzero(np.diff(slots, prepend=slots[:1] - 1))  # sequences that begin a run
    ends = starts[np.append(first[1:], len(slots))]
    runs = zip(slots[first].tolist(), starts[first].tolist(), ends.tolist(), strict=True)
    return [AdapterRun(*each) for each in runs if each[0] >= 0]


def row_adapters(layout: RowLayout) -> Ints:
    """Return the adapter slot of each row, [R]; -1: none."""
    counts = np.diff(layout.query_start.numpy())
    if layout.adapters is None:
        return np.full(counts.sum(), -1, dtype=np.int64)
    return layout.adapters.numpy().astype(np.int64).repeat(counts)


def check_rank(parts: Sequence[LowRank | None], max_rank: int) -> None:
    """Raises ConfigError for a rank above max_rank."""
    for part in parts:
        if part is not None and len(part.down) > max_rank:
            raise ConfigError(f"an adapter has rank {len(part.down)}; --max-lora-rank is {max_rank}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _TorchRoom:
    """firsts: the first column of each part, and behind the last one."""

    firsts: tuple[int, ...]
    dtype: torch.dtype
    max_rank: int
    slots: list[tuple[LowRank | None, ...] | None] = field(repr=False)


class TorchAdapters:
    """Adapters in tensor operations, run by run: the reference of the kernels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def room(
        self, parts: tuple[int, ...], _depth: int, dtype: torch.dtype, *, slots: int, max_rank: int
    ) -> _TorchRoom:
        firsts = tuple(accumulate(parts, initial=0))
        return _TorchRoom(firsts=firsts, dtype=dtype, max_rank=max_rank, slots=[None] * slots)

    def pack(self, room: _TorchRoom, parts: tuple[LowRank | None, ...]) -> tuple[LowRank | None, ...]:
        check_rank(parts, room.max_rank)

        def packed(part: Tensor) -> Tensor:
            return part.to(self._device, room.dtype, copy=True).contiguous()

        return tuple(each and LowRank(down=packed(each.down), up=packed(each.up)) for each in parts)

    def set(self, room: _TorchRoom, slot: int, packed: tuple[LowRank | None, ...] | None) -> None:
        room.slots[slot] = packed

    def rows(self, layout: RowLayout) -> list[AdapterRun] | None:
        return adapter_runs(layout) or None

    def rows_at(self, _slots: Tensor) -> list[AdapterRun]:
        raise AssertionError("the host reads the slots of rows")

    def add(self, x: Tensor, room: _TorchRoom, out: Tensor, rows: list[AdapterRun]) -> None:
        for slot, begin, end in rows:
            for part, first, last in zip(room.slots[slot] or (), room.firsts, room.firsts[1:], strict=False):
                if part is not None:
                    inner, columns = x[begin:end] @ part.down.T, out[begin:end, first:last]
                    columns.copy_(columns.float() + inner.float() @ part.up.float().T)
