"""Drafts of block drafters by the native kernels: tensors become addresses. See native/block_drafting.cpp."""

import ctypes

import numpy as np
import torch
from torch import Tensor

from faser.kernels.cpu import library as native_library
from faser.kernels.cpu.blocks import NativeBlocks, any_linear, reorders
from faser.kernels.cpu.draft_structs import drafts_struct, room_for_drafts, room_of_rows, rules_struct
from faser.kernels.interface.block_drafting import BlockDrafting, BlockInputs, BlockRoom, BlockStack
from faser.kernels.interface.blocks import DecoderLayer, DraftedTokens, DraftRules
from faser.kernels.interface.shapes import AttentionShape, KvCache
from faser.memo import WeakMemo
from faser.optional import maybe


class NativeBlockDrafting(BlockDrafting):
    """Native drafting of blocks. pools, blocks: of the same backend; blocks describes the layers."""

    def __init__(self, library: ctypes.CDLL, pools: native_library.LanePools, blocks: NativeBlocks) -> None:
        self._call = library.faser_block_draft
        self._pools = pools
        self._blocks = blocks
        self._stacks = WeakMemo(self._described)
        self._rooms = WeakMemo(_room)

    def takes(self, stack: BlockStack) -> bool:
        products = (stack.embedding, stack.fc, stack.logits.linear, *(stack.markov or ()))
        if any(map(reorders, products)) or not all(map(_is_usual, stack.layers.layers)):
            return False
        return self._blocks.stack_address(stack.layers) is not None

    def draft(
        self, stack: BlockStack, cache: KvCache, inputs: BlockInputs, rules: DraftRules, room: BlockRoom
    ) -> DraftedTokens:
        count, width = len(rules.max_tokens), int(rules.max_tokens.max())
        num_context = int(inputs.context.sum())
        num_rows = num_context + int(rules.max_tokens.sum()) + count * (not stack.predicts_from_anchor)
        assert rules.stop is None, "a block drafter has one pass"
        assert num_rows <= len(room.hidden), (num_rows, len(room.hidden))
        assert len(inputs.states) == num_context, (len(inputs.states), num_context)
        assert len(inputs.block_table) == len(inputs.anchors) == len(inputs.starts) == count
        assert inputs.states.stride(1) == 1 or not num_context
        assert inputs.states.dtype is room.hidden.dtype or not num_context
        arrays = [
            np.ascontiguousarray(each, dtype=dtype)
            for each, dtype in ((inputs.starts, np.int32), (inputs.context, np.int32), (inputs.anchors, np.int64))
        ]
        table = np.ascontiguousarray(inputs.block_table.numpy(), dtype=np.int32)
        kept, rules_of_call = rules_struct(rules, count, width)
        found = room_for_drafts(count, width)
        self._call(
            self._pools.address,
            ctypes.addressof(self._stacks[stack]),
            cache.address,
            ctypes.addressof(self._rooms[room]),
            ctypes.byref(rules_of_call),
            ctypes.byref(
                native_library.BlockInputStruct(
                    *(each.ctypes.data for each in arrays),
                    inputs.states.data_ptr(),
                    inputs.states.stride(0),
                    table.ctypes.data,
                    table.shape[1],
                    cache.shape.block_size,
                )
            ),
            ctypes.byref(drafts_struct(found)),
        )
        del kept
        return found

    def _described(self, stack: BlockStack) -> native_library.BlockDrafterStruct:
        ids, confidence = stack.draft_ids, stack.confidence
        assert ids is None or (ids.dtype == np.int64 and ids.flags.c_contiguous)
        causal = (ctypes.c_int32 * len(stack.causal))(*stack.causal)
        struct = native_library.BlockDrafterStruct(
            embedding=any_linear(stack.embedding),
            mask=maybe(Tensor.data_ptr, stack.mask),
            mask_token=stack.mask_token,
            fc=any_linear(stack.fc),
            hidden_norm=stack.hidden_norm.data_ptr(),
            eps=stack.eps,
            layers=self._blocks.stack_address(stack.layers),
            causal=ctypes.addressof(causal),
            num_layers=len(stack.layers.layers),
            norm=stack.logits.norm.data_ptr(),
            head=any_linear(stack.logits.linear),
            num_candidates=stack.num_candidates,
            draft_ids=native_library.address_of(ids),
            predicts_from_anchor=stack.predicts_from_anchor,
        )
        struct.kept = causal  # what it points to
        if stack.markov is not None:
            struct.markov_before, struct.markov_candidates = map(any_linear, stack.markov)
        if confidence is not None:
            of_hidden, of_before, struct.confidence_bias = confidence
            for each in (of_hidden, of_before):
                assert each.dtype is torch.float32, each.dtype
                assert each.is_contiguous()
            struct.confidence_of_hidden = of_hidden.data_ptr()
            struct.confidence_of_before = of_before.data_ptr() if len(of_before) else None
        return struct


def _room(room: BlockRoom) -> native_library.BlockRoomStruct:
    tensors = (room.inputs, room.hidden, room.layers.qkv, room.layers.mixed)
    return native_library.BlockRoomStruct(
        room_of_rows(tensors, room.hidden, room.layers.block, room.logits),
        *(each.data_ptr() for each in (*tensors, room.logits)),
        len(room.logits),
    )


def _is_usual(layer: DecoderLayer) -> bool:
    """Return whether nothing stands between the product, the rotation, attention and what follows it."""
    shape = layer.shape
    return layer.wide_norms is None and isinstance(shape, AttentionShape) and not shape.gated
