"""Drafts of heads by the native kernels: tensors become addresses. native/drafting.cpp has the loop."""

import ctypes

import numpy as np
import torch
from torch import Tensor

from faser.kernels.cpu import library as native_library
from faser.kernels.cpu.blocks import NativeBlocks, any_linear, normed_linear, reorders
from faser.kernels.cpu.draft_structs import drafts_struct, room_for_drafts, room_of_rows, rules_struct
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
from faser.memo import WeakMemo


class NativeHeadDrafting(HeadDrafting):
    """Native drafting of heads. pools, blocks: of the same backend; blocks describes the layers."""

    def __init__(self, library: ctypes.CDLL, pools: native_library.LanePools, blocks: NativeBlocks) -> None:
        self._call = library.faser_head_draft
        self._pools = pools
        self._blocks = blocks
        self._stacks = WeakMemo(self._described)
        self._rooms = WeakMemo(_room)

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
        kept, rules_of_call = rules_struct(rules, count, width)
        found = room_for_drafts(count, width)
        passes = self._call(
            self._pools.address,
            ctypes.addressof(self._stacks[stack]),
            cache.address,
            ctypes.addressof(self._rooms[room]),
            ctypes.byref(rules_of_call),
            ctypes.byref(_head_rows(rows, cache.shape.block_size)),
            ctypes.byref(drafts_struct(found)),
        )
        del kept
        return DraftedTokens(
            token_ids=found.token_ids,
            margins=found.margins,
            counts=found.counts,
            num_fed=np.minimum(found.num_fed, found.counts),
            passes=passes,
        )

    def _described(self, stack: HeadStack) -> native_library.DraftHeadStruct:
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
            draft_ids=native_library.address_of(ids),
        )
        struct.norms = norms  # what it points to
        width = stack.embedding.depth
        struct.fc = native_library.AnyLinearStruct(None, None, width, width)
        for name, product in products.items():
            setattr(struct, name, any_linear(product))
        struct.residual_is_normed = isinstance(stack, Eagle3Stack) and stack.residual_is_normed
        return struct


def _own_parts(stack: HeadStack) -> tuple[tuple[Tensor, ...], dict[str, PackedLinear]]:
    """Norms of the states, and the products of this kind of head by their fields of FaserDraftHead."""
    if isinstance(stack, MtpStack):
        return (stack.final_norm,), {"stream": stack.fc}
    assert isinstance(stack, Eagle3Stack), stack
    return stack.state_norms, {"fc": stack.fc, "qkv": stack.qkv}


def _room(room: DraftRoom) -> native_library.DraftRoomStruct:
    layers, hidden = room.layers, room.hidden
    tensors = (room.states, room.features, room.embedded, room.joined, hidden, layers.qkv, layers.mixed)
    rows = room_of_rows(tensors, hidden, layers.block, room.logits)
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
