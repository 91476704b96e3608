"""Layers and their units on the native backend. Oracle: its single operations, bit for bit.

Bugs these tests have been seen to catch: the residual left out, gate and up in the wrong buffer, the next
layer's norm for this one's, structures of a layer that is gone used for another at the same address, inputs
that are not reordered, keys of every layer in the first one's blocks, queries that are not rotated, no norm
of what attention adds. Of Gemma 4: values not normalised, or by the norm of keys; keys and values of the layer
before; a scale, or what tokens give, left out.
"""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.interface.backend import SeparateBlocks, SeparateLayers
from faser.kernels.interface.blocks import (
    BlockBuffers,
    Blocks,
    DecoderLayer,
    DecoderStack,
    Experts,
    ExpertsBeside,
    FeedForward,
    LayerBuffers,
    Layers,
    NormedLinear,
    TokenInputs,
)
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.shapes import AttentionShape, PackedLinear, RowLayout
from faser.types.activation import Activation
from tests.kernels.interface.low_bit.blocks import random_blocks

HIDDEN, HEADS, INNER, QKV = 64, 96, 160, 128
HEAD_DIM = 16
KV_HEADS = (QKV - HEADS) // 2 // HEAD_DIM
BLOCK_SIZE = 16


def random(*size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def layer(
    backend: NativeBackend, dtype: torch.dtype, low_bit: str, seed: int = 0
) -> tuple[FeedForward, NormedLinear]:
    """A layer, and the product before the next attention. low_bit: names of products in blocks."""

    def packed(name: str, outputs: int, inputs: int) -> PackedLinear:
        bias = random(outputs, seed=seed + 1).to(dtype)
        if name in low_bit.split():
            return backend.pack(random_blocks("Q4_1", outputs, inputs, seed=seed), bias)
        return backend.pack((random(outputs, inputs, seed=seed) / inputs**0.5).to(dtype), bias)

    def normed(name: str, outputs: int, number: int) -> NormedLinear:
        norm = 1 + random(HIDDEN, seed=seed + number) / 4
        return NormedLinear(norm=norm, eps=1e-5, linear=packed(name, outputs, HIDDEN))

    block = FeedForward(
        attention_out=packed("out", HIDDEN, HEADS),
        gate_up=normed("gate_up", 2 * INNER, 2),
        down=packed("down", HIDDEN, INNER),
    )
    return block, normed("qkv", QKV, 3)


def block_buffers(rows: int, dtype: torch.dtype) -> BlockBuffers:
    sizes = {"normed": HIDDEN, "gate_up": 2 * INNER, "inner": INNER}
    return BlockBuffers(**{name: torch.empty(rows, size, dtype=dtype) for name, size in sizes.items()})


def layer_stack(backend: NativeBackend, dtype: torch.dtype, low_bit: str, count: int) -> DecoderStack:
    """Layers that differ in windows, rotation, norms of heads and of what is added, activation, scores.

    As the head, the first product once more.
    """
    shape = AttentionShape(num_heads=HEADS // HEAD_DIM, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, scale=0.25)
    layers = []
    for number in range(count):
        block, qkv = layer(backend, dtype, low_bit, seed=10 * number)
        norm = 1 + random(HEAD_DIM, seed=number) / 4
        if number == 2:
            after = [1 + random(HIDDEN, seed=seed) / 4 for seed in (5, 6)]
            block = replace(
                block, activation=Activation.GELU_TANH, norm_after_attention=after[0], norm_after=after[1]
            )
        layers.append(
            DecoderLayer(
                qkv=qkv,
                shape=replace(shape, window=5 if number == 1 else None, score_cap=2.0 if number == 2 else None),
                angles=None if number == 2 else random(40, HEAD_DIM, seed=number),
                query_angles=random(40, HEAD_DIM, seed=number + 7) if number == 1 else None,
                sinks=random(HEADS // HEAD_DIM, seed=number) if number == 1 else None,
                q_norm=norm if number else None,
                k_norm=norm if number else None,
                eps=1e-5,
                feed_forward=block,
            )
        )
    return DecoderStack(layers=tuple(layers), head=layers[0].qkv)


def run_layers(
    backend: NativeBackend,
    layers: Layers,
    stack: DecoderStack,
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    *,
    captures: bool = False,
    qkv: Tensor | None = None,
) -> Tensor:
    """The stream after all layers, of sequences whose last tokens are rows; in two calls. qkv: of the first."""
    rows, count = sum(lengths), len(stack.layers)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(each) for each in lengths]).int()
    table = torch.arange(2 * len(lengths)).view(-1, 2).int()
    layout = RowLayout(
        query_start=starts, seq_len=torch.tensor(lengths).int(), positions=positions, block_table=table
    )
    cache = backend.allocate_kv(
        KvShape(
            heads=tuple((0 if each.kv_layer is not None else KV_HEADS, HEAD_DIM) for each in stack.layers),
            num_blocks=table.numel(),
            block_size=BLOCK_SIZE,
            dtype=dtype,
        )
    )
    hidden, plan = random(rows, HIDDEN, seed=7).to(dtype), backend.plan(layout, BLOCK_SIZE)
    buffers = LayerBuffers(
        qkv=torch.empty(rows, QKV, dtype=dtype) if qkv is None else qkv.clone(),
        mixed=torch.empty(rows, HEADS, dtype=dtype),
        block=block_buffers(rows, dtype),
    )
    for first, last in ((0, 1), (1, count)):
        layers.run(stack, first, last, hidden, cache, plan, buffers, captures=captures)
    return hidden


def run(
    blocks: Blocks, block: FeedForward, following: NormedLinear | None, rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The stream afterwards, the next product, and the product before the first attention."""
    hidden, mixed = random(rows, HIDDEN, seed=4).to(dtype), random(rows, HEADS, seed=5).to(dtype)
    buffers = block_buffers(rows, dtype)
    out, wide = torch.zeros(rows, QKV, dtype=dtype), torch.zeros(rows, 2 * INNER)
    blocks.normed_linear(random(rows, 2 * HIDDEN, seed=6).to(dtype)[:, HIDDEN:], block.gate_up, wide, buffers)
    blocks.feed_forward(mixed, hidden, block, following, out, buffers)
    return hidden, out, wide


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("low_bit", ["", "out gate_up down qkv", "down"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_in_one_call_has_the_bits_of_single_operations(
    native: NativeBackend, dtype: torch.dtype, low_bit: str, rows: int
) -> None:
    block, following = layer(native, dtype, low_bit)
    for next_product in (following, None):
        found = run(native.blocks, block, next_product, rows, dtype)
        wanted = run(SeparateBlocks(native), block, next_product, rows, dtype)
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(ours, theirs)
        assert found[1].any() == (next_product is not None)


@pytest.mark.parametrize("reordered", ["attention_out", "down"])
def test_products_whose_inputs_have_another_order_are_right_too(
    native_alone: NativeBackend, reordered: str
) -> None:
    block, following = layer(native_alone, torch.bfloat16, "")
    depth = {"attention_out": HEADS, "down": INNER}[reordered]
    order = np.random.default_rng(0).permutation(depth).astype(np.int32)
    packed = native_alone.pack(replace(random_blocks("Q8_0", HIDDEN, depth), order=order))
    block = FeedForward(
        attention_out=packed if reordered == "attention_out" else block.attention_out,
        gate_up=block.gate_up,
        down=packed if reordered == "down" else block.down,
    )
    found = run(native_alone.blocks, block, following, 3, torch.bfloat16)
    wanted = run(SeparateBlocks(native_alone), block, following, 3, torch.bfloat16)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))


def test_a_layer_that_is_gone_leaves_nothing_to_one_in_its_place(native_alone: NativeBackend) -> None:
    blocks, dtype = native_alone.blocks, torch.float32
    for seed in range(6):
        block, following = layer(native_alone, dtype, "", seed=seed)
        found = run(blocks, block, following, 2, dtype)
        wanted = run(SeparateBlocks(native_alone), block, following, 2, dtype)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True)), seed
        del block, following
        gc.collect()


@pytest.mark.parametrize("lengths", [(1,), (3, 1, 20), (1,) * 9])
@pytest.mark.parametrize("low_bit", ["", "out gate_up down qkv", "down"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_layers_in_one_call_have_the_bits_of_single_operations(
    native: NativeBackend, dtype: torch.dtype, low_bit: str, lengths: tuple[int, ...]
) -> None:
    stack = layer_stack(native, dtype, low_bit, 3)
    separate = SeparateLayers(native, SeparateBlocks(native))
    found = run_layers(native, native.layers, stack, lengths, dtype)
    assert torch.equal(found, run_layers(native, separate, stack, lengths, dtype))


def gemma4_stack(backend: NativeBackend, dtype: torch.dtype, low_bit: str, rows: int) -> DecoderStack:
    """Layers as in Gemma 4: values are normalised, tokens add inputs, an output scale; of three layers the second
    has a mixture beside its network, and the third reads the keys and values of the first.
    """
    plain, size = layer_stack(backend, dtype, low_bit, 3).layers, 48
    room = random(rows + 2, 3 * 2 * size, seed=20).to(dtype)

    def packed(outputs: int, inputs: int, seed: int) -> PackedLinear:
        return backend.pack((random(outputs, inputs, seed=seed) / inputs**0.5).to(dtype))

    def norm(seed: int) -> Tensor:
        return 1 + random(HIDDEN, seed=seed) / 4

    mixture = Experts(
        router=packed(4, HIDDEN, 30),
        gate_up=tuple(packed(2 * size, HIDDEN, 31 + each) for each in range(4)),
        down=tuple(packed(HIDDEN, size, 41 + each) for each in range(4)),
        top_k=2,
        renormalise=True,
        activation=Activation.GELU_TANH,
        scales=1 + random(4, seed=50) / 4,
    )
    beside = ExpertsBeside(
        experts=mixture, norm=norm(51), router_norm=norm(52), norm_after=norm(53), norm_after_network=norm(54)
    )
    layers = []
    for number, each in enumerate(plain):
        block = each.feed_forward
        assert isinstance(block, FeedForward)
        block = replace(
            block,
            activation=Activation.GELU_TANH,
            norm_after_attention=norm(60 + number),
            norm_after=norm(70 + number),
            beside=beside if number == 1 else None,
            token_inputs=TokenInputs(
                gate=packed(size, HIDDEN, 80 + number),
                out=packed(HIDDEN, size, 90 + number),
                norm=norm(100 + number),
                room=room[:, 2 * size * number : 2 * size * (number + 1)],
            ),
            scale=0.5 + number / 4,
        )
        layers.append(replace(each, feed_forward=block, v_norm=torch.ones(HEAD_DIM)))
    first, third = layers[0], layers[2]
    assert isinstance(third.shape, AttentionShape)
    assert third.qkv is not None
    shape = replace(third.shape, reads_other=True)
    queries = replace(third.qkv, linear=packed(shape.columns, HIDDEN, 110))
    layers[2] = replace(third, shape=shape, qkv=queries, kv_layer=0, v_norm=None, k_norm=None)
    return DecoderStack(layers=tuple(layers), head=first.qkv)


@pytest.mark.parametrize("lengths", [(1,), (3, 1), (20, 31)])
@pytest.mark.parametrize("low_bit", ["", "gate_up down"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_of_gemma_4_in_one_call_have_the_bits_of_single_operations(
    native: NativeBackend, dtype: torch.dtype, low_bit: str, lengths: tuple[int, ...]
) -> None:
    stack = gemma4_stack(native, dtype, low_bit, sum(lengths))
    assert not native.layers.separate(stack)
    separate = SeparateLayers(native, SeparateBlocks(native))
    found = run_layers(native, native.layers, stack, lengths, dtype)
    assert found.isfinite().all()
    assert torch.equal(found, run_layers(native, separate, stack, lengths, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_with_room_for_states_keep_their_inputs_where_a_step_captures(
    native: NativeBackend, dtype: torch.dtype
) -> None:
    """Oracle: the stream after a stack of the layers before. The states of two layers lie side by side."""
    room = torch.zeros(9, 2 * HIDDEN, dtype=dtype)
    stack = layer_stack(native, dtype, "", 3)
    first, second, third = stack.layers
    second, third = replace(second, states=room[:, :HIDDEN]), replace(third, states=room[:, HIDDEN:])
    stack = replace(stack, layers=(first, second, third))
    for layers in (native.layers, SeparateLayers(native, SeparateBlocks(native))):
        run_layers(native, layers, stack, (3, 4), dtype)
        assert not room.any(), "this step does not capture"
        run_layers(native, layers, stack, (3, 4), dtype, captures=True)
        for count, states in ((1, room[:7, :HIDDEN]), (2, room[:7, HIDDEN:])):
            before = replace(stack, layers=stack.layers[:count])
            assert torch.equal(states, run_layers(native, layers, before, (3, 4), dtype))
        assert not room[7:].any()
        room.zero_()


def test_a_first_layer_without_a_product_takes_the_one_that_is_given(native: NativeBackend) -> None:
    """Oracle: single operations, and the layers themselves where what is given is their own product."""
    stack = layer_stack(native, torch.bfloat16, "down qkv", 2)
    product = stack.layers[0].qkv
    assert product is not None
    hidden = random(7, HIDDEN, seed=7).to(torch.bfloat16)
    given = SeparateBlocks(native).normed_linear(
        hidden, product, torch.empty(7, QKV, dtype=torch.bfloat16), block_buffers(7, torch.bfloat16)
    )
    bare = replace(stack, layers=(replace(stack.layers[0], qkv=None), stack.layers[1]))
    separate = SeparateLayers(native, SeparateBlocks(native))
    wanted = run_layers(native, native.layers, stack, (3, 4), torch.bfloat16)
    for layers in (native.layers, separate):
        assert torch.equal(run_layers(native, layers, bare, (3, 4), torch.bfloat16, qkv=given), wanted)


def test_a_layer_that_reorders_its_inputs_runs_in_single_operations_alone(
    native_alone: NativeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so."""
    stack = layer_stack(native_alone, torch.bfloat16, "", 2)
    order = np.random.default_rng(0).permutation(INNER).astype(np.int32)
    block = stack.layers[1].feed_forward
    assert isinstance(block, FeedForward)
    down = native_alone.pack(replace(random_blocks("Q8_0", HIDDEN, INNER), order=order))
    reordered = replace(stack.layers[1], feed_forward=replace(block, down=down))
    stack = replace(stack, layers=(stack.layers[0], reordered, stack.layers[0]))
    assert native_alone.layers.separate(stack) == {1}
    assert "1 of 3 layers run in single operations" in caplog.text
    assert "products take their inputs in another order" in caplog.text
    separate = SeparateLayers(native_alone, SeparateBlocks(native_alone))
    found = run_layers(native_alone, native_alone.layers, stack, (2, 3), torch.bfloat16)
    assert torch.equal(found, run_layers(native_alone, separate, stack, (2, 3), torch.bfloat16))
