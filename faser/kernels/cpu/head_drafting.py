"""Drafts of EAGLE-3 heads by the native kernels: tensors become addresses. native/drafting.cpp has the loop."""

import ctypes
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from faser.kernels.cpu import library as native_library
from faser.kernels.cpu.blocks import DTYPES, NativeBlocks, any_linear, normed_linear, reorders
from faser.kernels.interface.blocks import (
    DraftedTokens,
    DraftRoom,
    DraftRules,
    Eagle3Stack,
    HeadDrafting,
    HeadRows,
)
from faser.kernels.interface.shapes import KvCache


class NativeHeadDrafting(HeadDrafting):
    """See HeadDrafting. pools, blocks: of the same backend; blocks describes the layers."""

    def __init__(self, library: ctypes.CDLL, pools: native_library.LanePools, blocks: NativeBlocks) -> None:
        self._call = library.faser_eagle3_draft
        self._pools = pools
        self._blocks = blocks
        self._stacks: WeakKeyDictionary[Eagle3Stack, native_library.Eagle3Struct] = WeakKeyDictionary()
        self._rooms: WeakKeyDictionary[DraftRoom, native_library.DraftRoomStruct] = WeakKeyDictionary()

    def takes(self, stack: Eagle3Stack) -> bool:
        layers = stack.layers
        if layers.head is None or layers.layers[0].qkv is not None:
            return False
        if any(map(reorders, (stack.embedding, stack.fc, stack.qkv, layers.head.linear))):
            return False
        return self._blocks.stack_address(layers) is not None

    def draft(
        self, stack: Eagle3Stack, cache: KvCache, rows: HeadRows, rules: DraftRules, room: DraftRoom
    ) -> DraftedTokens:
        count, width = len(rules.max_tokens), int(rules.max_tokens.max())
        assert len(room.hidden) == len(rows.token_ids) == len(rows.states) == len(rows.layout.positions)
        assert len(rows.layout.block_table) == count <= len(room.logits)
        kept, rules_struct = _rules(rules, count, width)
        found = DraftedTokens(
            token_ids=np.zeros((count, width), dtype=np.int64),
            margins=np.zeros((count, width)),
            counts=np.empty(count, dtype=np.int64),
            num_fed=np.empty(count, dtype=np.int64),
            passes=0,
        )
        passes = self._call(
            self._pools.address,
            ctypes.addressof(self._stack(stack)),
            cache.address,
            ctypes.addressof(self._room(room)),
            ctypes.byref(rules_struct),
            ctypes.byref(_head_rows(rows, cache.shape.block_size)),
            ctypes.byref(
                native_library.DraftsStruct(
                    *(each.ctypes.data for each in (found.token_ids, found.margins, found.counts, found.num_fed))
                )
            ),
        )
        del kept
        return DraftedTokens(
            token_ids=found.token_ids,
            margins=found.margins,
            counts=found.counts,
            num_fed=np.minimum(found.num_fed, found.counts),
            passes=passes,
        )

    def _stack(self, stack: Eagle3Stack) -> native_library.Eagle3Struct:
        struct = self._stacks.get(stack)
        if struct is None:
            logits = stack.layers.head
            assert logits is not None, "see takes"
            ids = stack.draft_ids
            assert ids is None or (ids.dtype == np.int64 and ids.flags.c_contiguous)
            norms = (ctypes.c_void_p * len(stack.state_norms))(*(each.data_ptr() for each in stack.state_norms))
            struct = native_library.Eagle3Struct(
                any_linear(stack.embedding),
                stack.embedding_norm.data_ptr(),
                ctypes.addressof(norms),
                len(norms),
                any_linear(stack.fc),
                stack.feature_norm.data_ptr(),
                stack.eps,
                stack.residual_is_normed,
                any_linear(stack.qkv),
                self._blocks.stack_address(stack.layers),
                len(stack.layers.layers),
                normed_linear(logits),
                None if ids is None else ids.ctypes.data,
            )
            struct.norms = norms  # what it points to
            self._stacks[stack] = struct
        return struct

    def _room(self, room: DraftRoom) -> native_library.DraftRoomStruct:
        struct = self._rooms.get(room)
        if struct is None:
            struct = self._rooms[room] = _room(room)
        return struct


def _room(room: DraftRoom) -> native_library.DraftRoomStruct:
    layers, hidden = room.layers, room.hidden
    block = layers.block
    tensors = (room.states, room.features, room.embedded, room.joined, hidden, layers.qkv, layers.mixed)
    for each in (*tensors, block.normed, block.gate_up, block.inner):
        _check(each, len(hidden), hidden.dtype)
    _check(room.logits, len(room.logits), torch.float32)
    rows = native_library.BlockRowsStruct(
        len(hidden),
        DTYPES[hidden.dtype],
        block.normed.data_ptr(),
        block.gate_up.data_ptr(),
        block.inner.data_ptr(),
    )
    return native_library.DraftRoomStruct(rows, *(each.data_ptr() for each in tensors), room.logits.data_ptr())


def _head_rows(rows: HeadRows, block_size: int) -> native_library.HeadRowsStruct:
    layout, states = rows.layout, rows.states
    table = layout.block_table
    for each in (layout.query_start, layout.positions, table):
        assert each.is_contiguous()
        assert each.dtype is torch.int32, each.dtype
    assert rows.token_ids.dtype is torch.int64, rows.token_ids.dtype
    assert states.stride(1) == 1
    return native_library.HeadRowsStruct(
        len(states),
        rows.token_ids.data_ptr(),
        states.data_ptr(),
        states.stride(0),
        layout.query_start.data_ptr(),
        layout.positions.data_ptr(),
        table.data_ptr(),
        table.shape[1],
        block_size,
    )


def _check(tensor: Tensor, rows: int, dtype: torch.dtype) -> None:
    assert tensor.is_contiguous()
    assert len(tensor) == rows, (len(tensor), rows)
    assert tensor.dtype is dtype, (tensor.dtype, dtype)


def _rules(rules: DraftRules, count: int, width: int) -> tuple[object, native_library.DraftRulesStruct]:
    """What the struct points to, and the struct."""
    max_tokens = np.ascontiguousarray(rules.max_tokens)
    arrays: list[np.ndarray | None] = [max_tokens, None, None, None, None, None]
    metadata = rules.metadata
    if metadata is not None:
        assert rules.noise is not None
        assert rules.noise.shape == (count, width), rules.noise.shape
        arrays[1:] = [
            np.ascontiguousarray(metadata.temperature),
            # Rounded as engine/execution/sampling/distribution.py does.
            torch.from_numpy(metadata.min_p).log().float().numpy(),
            np.ascontiguousarray(metadata.top_k),
            np.ascontiguousarray(metadata.top_p),
            np.ascontiguousarray(rules.noise),
        ]
    stop = rules.stop
    prices = None if stop is None else np.array(stop.pass_prices, dtype=np.float64)
    assert prices is None or len(prices) >= count, "a price for each number of sequences"
    struct = native_library.DraftRulesStruct(
        count,
        width,
        *(None if each is None else each.ctypes.data for each in arrays),
        None if prices is None else prices.ctypes.data,
        *((0.0, 0.0, 0.0) if stop is None else (stop.row_price, stop.intercept, stop.slope)),
    )
    return (arrays, prices), struct
