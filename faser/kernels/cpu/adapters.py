"""Adapters on the native backend: packed as weights are, and added by native/adapters.cpp.

`down` of all parts of a product lies in one weight: x is read once, however many parts the product has.
"""

import ctypes
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from faser.kernels.cpu.blocks import DTYPES
from faser.kernels.cpu.library import (
    AdapterPartStruct,
    AdapterRowsStruct,
    AdapterStruct,
    LanePools,
    LinearStruct,
    full_pool,
)
from faser.kernels.cpu.memory import Slabs
from faser.kernels.interface.adapters import LowRank, adapter_runs, check_rank
from faser.kernels.interface.shapes import RowLayout

_SLAB_BYTES = 4 << 20  # one may be kept by an adapter that has a small part of it
_PAIR = 2  # numbers of bfloat16 are multiplied in pairs, so ranks are padded to even ones


class NativeRoom:
    """The adapters of a product. address: of its FaserAdapters, one for each slot."""

    __slots__ = ("_kept", "_structs", "address", "depth", "dtype", "firsts", "max_rank")

    def __init__(self, parts: tuple[int, ...], depth: int, dtype: torch.dtype, slots: int, max_rank: int) -> None:
        self.firsts = tuple(accumulate(parts, initial=0))
        self.depth, self.dtype, self.max_rank = depth, dtype, max_rank
        self._structs = (AdapterStruct * slots)()
        self._kept: list[PackedNative | None] = [None] * slots
        self.address = ctypes.addressof(self._structs)
        for slot in range(slots):
            self.put(slot, None)

    def put(self, slot: int, packed: "PackedNative | None") -> None:
        self._kept[slot] = packed
        self._structs[slot] = packed.struct if packed else AdapterStruct(LinearStruct(dtype=DTYPES[self.dtype]))


class PackedNative:
    """An adapter of a product. struct: its FaserAdapter."""

    __slots__ = ("_kept", "struct")

    def __init__(self, struct: AdapterStruct, *kept: object) -> None:
        self.struct, self._kept = struct, kept


class NativeRows:
    """Runs of rows with one adapter. address: of its FaserAdapterRows."""

    __slots__ = ("_kept", "address")

    def __init__(self, runs: list[tuple[int, int, int]]) -> None:
        array = np.array(sorted(runs), dtype=np.int64)  # those of one slot are neighbours
        struct = AdapterRowsStruct(array.ctypes.data, len(runs))
        self.address = ctypes.addressof(struct)
        self._kept = (array, struct)


class NativeAdapters:
    """Adapters of the native backend, see Adapters. pools: of the backend; the one in use computes."""

    def __init__(self, library: ctypes.CDLL, pools: LanePools) -> None:
        self._library = library
        self._pools = pools
        self._slabs = Slabs(_SLAB_BYTES)
        self._alone = full_pool(library, 1)  # its jobs run in the calling thread, beside steps

    def room(
        self, parts: tuple[int, ...], depth: int, dtype: torch.dtype, *, slots: int, max_rank: int
    ) -> NativeRoom:
        return NativeRoom(parts, depth, dtype, slots, max_rank)

    def pack(self, room: NativeRoom, parts: tuple[LowRank | None, ...]) -> PackedNative:
        check_rank(parts, room.max_rank)
        downs, ups, first = [], [], 0
        for column, part in zip(room.firsts, parts, strict=False):
            if part is None:
                continue
            rank = -(-len(part.down) // _PAIR) * _PAIR
            down = torch.zeros(rank, room.depth, dtype=room.dtype)
            up = torch.zeros(len(part.up), rank, dtype=room.dtype)
            down[: len(part.down)], up[:, : len(part.down)] = part.down, part.up
            downs.append(down)
            ups.append((column, first, self._packed(up)))
            first += rank
        if not downs:
            return PackedNative(AdapterStruct(LinearStruct(dtype=DTYPES[room.dtype])))
        structs = (AdapterPartStruct * len(ups))(
            *(AdapterPartStruct(struct, column, first) for column, first, (struct, _) in ups)
        )
        down_struct, panels = self._packed(torch.cat(downs))
        struct = AdapterStruct(down_struct, ctypes.addressof(structs), len(ups))
        return PackedNative(struct, structs, panels, [kept for _, _, (_, kept) in ups])

    def _packed(self, weight: Tensor) -> tuple[LinearStruct, Tensor]:
        """A FaserLinear of a weight [N, K], and its memory."""
        (columns, depth), dtype = weight.shape, DTYPES[weight.dtype]
        panels = self._slabs.take(self._library.faser_packed_bytes(columns, depth, dtype))
        struct = LinearStruct(panels.data_ptr(), None, columns, depth, dtype)
        self._library.faser_pack(self._alone.address, ctypes.addressof(struct), weight.data_ptr())
        return struct, panels

    def set(self, room: NativeRoom, slot: int, packed: PackedNative | None) -> None:
        room.put(slot, packed)

    def rows(self, layout: RowLayout) -> NativeRows | None:
        runs = adapter_runs(layout)
        return NativeRows([*runs]) if runs else None

    def rows_at(self, _slots: Tensor) -> NativeRows:
        raise AssertionError("a CPU captures no graphs")

    def add(self, x: Tensor, room: NativeRoom, out: Tensor, rows: NativeRows) -> None:
        assert x.dtype is room.dtype, (x.dtype, room.dtype)
        assert x.shape[1] == room.depth, (x.shape, room.depth)
        assert out.shape == (len(x), room.firsts[-1]), (out.shape, x.shape, room.firsts)
        assert x.stride(1) == out.stride(1) == 1
        self._library.faser_add_adapters(
            self._pools.address,
            room.address,
            rows.address,
            x.data_ptr(),
            x.stride(0),
            out.data_ptr(),
            out.stride(0),
            DTYPES[out.dtype],
        )
