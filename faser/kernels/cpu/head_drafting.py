"""Drafts of heads by the native kernels: tensors become addresses. native/drafting.cpp has the loop."""

import ctypes
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from faser.kernels.cpu import library as native_library
from faser.kernels.cpu.blocks import DTYPES, NativeBlocks, any_linear, normed_linear, reorders
from faser.kernels.cpu.low_bit import LowBitLinear
from faser.kernels.interface.blocks import (
    DraftedTokens,
    DraftRoom,
    DraftRules,
    Eagle3Stack,
    HeadDrafting,
    HeadRows,
    HeadStack,
    MtpStack,
)
from faser.kernels.interface.shapes import KvCache, PackedLinear


class NativeHeadDrafting(HeadDrafting):
    """See HeadDrafting. pools, blocks: of the same backend; blocks describes the layers."""

    def __init__(self, library: ctypes.CDLL, pools: native_library.LanePools, blocks: NativeBlocks) -> None:
        self._call = library.faser_head_draft
        self._pools = pools
        self._blocks = blocks
        self._stacks: WeakKeyDictionary[HeadStack, native_library.DraftHeadStruct] = WeakKeyDictionary()
        self._rooms: WeakKeyDictionary[DraftRoom, native_library.DraftRoomStruct] = WeakKeyDictionary()

    def takes(self, stack: HeadStack) -> bool:
        _, products = _own_parts(stack)
        if any(map(reorders, (stack.embedding, *products.values(), stack.logits.linear))):
            return False
        return self._blocks.stack_address(stack.layers) is not None

    def without_middle(self, packed: PackedLinear, count: int) -> PackedLinear:
        assert isinstance(packed, LowBitLinear), packed
        return packed.without_middle(count)

    def draft(
        self, stack: HeadStack, cache: KvCache, rows: HeadRows, rules: DraftRules, room: DraftRoom
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

    def _stack(self, stack: HeadStack) -> native_library.DraftHeadStruct:
        struct = self._stacks.get(stack)
        if struct is None:
            ids = stack.draft_ids
            assert ids is None or (ids.dtype == np.int64 and ids.flags.c_contiguous)
            of_states, products = _own_parts(stack)
            norms = (ctypes.c_void_p * len(of_states))(*(each.data_ptr() for each in of_states))
            struct = native_library.DraftHeadStruct(
                embedding=any_linear(stack.embedding),
                embedding_norm=stack.embedding_norm.data_ptr(),
                state_norms=ctypes.addressof(norms),
                num_state_norms=len(norms),
                feature_norm=stack.feature_norm.data_ptr(),
                eps=stack.eps,
                layers=self._blocks.stack_address(stack.layers),
                num_layers=len(stack.layers.layers),
                logits=normed_linear(stack.logits),
                norm_output=stack.norm_output,
                draft_ids=None if ids is None else ids.ctypes.data,
            )
            struct.norms = norms  # what it points to
            width = stack.embedding.depth
            struct.fc = native_library.AnyLinearStruct(None, None, width, width)
            for name, product in products.items():
                setattr(struct, name, any_linear(product))
            struct.residual_is_normed = isinstance(stack, Eagle3Stack) and stack.residual_is_normed
            self._stacks[stack] = struct
        return struct

    def _room(self, room: DraftRoom) -> native_library.DraftRoomStruct:
        struct = self._rooms.get(room)
        if struct is None:
            struct = self._rooms[room] = _room(room)
        return struct


def _own_parts(stack: HeadStack) -> tuple[tuple[Tensor, ...], dict[str, PackedLinear]]:
    """Norms of the states, and the products of this kind of head by their fields of FaserDraftHead."""
    if isinstance(stack, MtpStack):
        return (stack.final_norm,), {"stream": stack.fc}
    assert isinstance(stack, Eagle3Stack), stack
    return stack.state_norms, {"fc": stack.fc, "qkv": stack.qkv}


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
