"""Mixtures of experts on the native backend: against the reference, and the promise that a row's bits are its own.

Bugs these tests have been seen to catch: weights never or always renormalised, rows gathered for other pairs
than they are for, two pairs of a row swapped, the last columns or panels of an expert left out, rows
multiplied with the expert before or, in blocks of rows, after, a sum that begins with another expert in each
row, weights that reorder their inputs multiplied as they lie; a shared expert left out, not weighed, or weighed by
the logit of another row.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.blocks import DecoderLayer, Experts, MixedFeedForward
from faser.kernels.interface.forward import SeparateBlocks, SeparateLayers
from faser.kernels.interface.low_bit.rows import stack_low_bit
from faser.kernels.interface.shapes import PackedLinear
from faser.kernels.torch_backend import TorchBackend
from tests.kernels.cpu.test_blocks import HEADS, HIDDEN, layer_stack, random, run_layers
from tests.kernels.interface.low_bit.blocks import random_blocks

COUNT, TOP, INNER = 11, 3, 96
REFERENCE = TorchBackend()


def experts_of(backend: Backend, dtype: torch.dtype, form: str, *, renormalise: bool) -> Experts:
    """form: of the weights, a format of GGUF's, or float."""

    def packed(outputs: int, inputs: int, seed: int) -> PackedLinear:
        if form != "float":
            return backend.pack(random_blocks(form, outputs, inputs, seed=seed))
        return backend.pack((random(outputs, inputs, seed=seed) / inputs**0.5).to(dtype))

    return Experts(
        router=backend.pack((random(COUNT, HIDDEN, seed=90) / 4).to(dtype)),
        gate_up=tuple(packed(2 * INNER, HIDDEN, seed) for seed in range(COUNT)),
        down=tuple(packed(HIDDEN, INNER, 20 + seed) for seed in range(COUNT)),
        top_k=TOP,
        renormalise=renormalise,
    )


def with_shared(block: Experts, backend: Backend, dtype: torch.dtype, form: str) -> Experts:
    """The same with an expert that every row passes, wider than the others. form: of its weights."""
    size = 2 * INNER

    def packed(outputs: int, inputs: int, seed: int) -> PackedLinear:
        if form != "float":
            return backend.pack(random_blocks(form, outputs, inputs, seed=seed))
        return backend.pack((random(outputs, inputs, seed=seed) / inputs**0.5).to(dtype))

    router = random(COUNT + 1, HIDDEN, seed=90) / 4
    return replace(
        block,
        router=backend.pack(router.to(dtype)),
        shared=(packed(2 * size, HIDDEN, 50), packed(HIDDEN, size, 51)),
    )


def added(backend: Backend, experts: Experts, x: Tensor) -> Tensor:
    hidden = torch.ones_like(x)
    backend.experts(x, experts, hidden)
    return hidden


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("form", ["float", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("rows", [1, 5, 170])
def test_a_mixture_matches_the_reference(native: NativeBackend, rows: int, form: str, renormalise: bool) -> None:
    x = random(rows, HIDDEN, seed=5)
    found, wanted = (
        added(backend, experts_of(backend, torch.float32, form, renormalise=renormalise), x)
        for backend in (native, REFERENCE)
    )
    near = 1e-5 if form == "float" else 1e-3  # a last bit decides to which byte a number is rounded
    assert_close(found, wanted, rtol=near, atol=2 * near)
    other = added(REFERENCE, experts_of(REFERENCE, torch.float32, form, renormalise=not renormalise), x)
    assert (other - wanted).abs().max() > 4 * (found - wanted).abs().max()


@pytest.mark.parametrize("form", ["float", "Q8_0"])
def test_weights_are_scaled_by_expert_and_the_router_may_see_something_else(
    native: NativeBackend, form: str
) -> None:
    """As in Gemma 4."""
    x, routed_by, scales = random(30, HIDDEN, seed=5), random(30, HIDDEN, seed=8), random(COUNT, seed=9)

    def added_by(backend: Backend, scales: Tensor | None, routed_by: Tensor | None) -> Tensor:
        hidden = torch.ones_like(x)
        block = replace(experts_of(backend, torch.float32, form, renormalise=True), scales=scales)
        backend.experts(x, block, hidden, routed_by)
        return hidden

    found, wanted = (added_by(backend, scales, routed_by) for backend in (native, REFERENCE))
    near = 1e-5 if form == "float" else 1e-3
    assert_close(found, wanted, rtol=near, atol=2 * near)
    for other in (added_by(REFERENCE, None, routed_by), added_by(REFERENCE, scales, None)):
        assert (other - wanted).abs().max() > 4 * (found - wanted).abs().max()


@pytest.mark.parametrize("form, of_shared", [("float", "float"), ("Q4_1", "Q8_0"), ("Q4_1", "float")])
@pytest.mark.parametrize("rows", [1, 5, 170])
def test_a_shared_expert_matches_the_definition(
    native: NativeBackend, rows: int, form: str, of_shared: str
) -> None:
    """Oracle: what a mixture of one expert gives, whose weight is 1, times σ of a product in torch."""
    x, float32 = random(rows, HIDDEN, seed=5), torch.float32
    routed = experts_of(REFERENCE, float32, form, renormalise=False)
    block = with_shared(routed, REFERENCE, float32, of_shared)
    assert block.shared is not None
    gates = random(COUNT + 1, HIDDEN, seed=90) / 4
    alone = Experts(
        router=REFERENCE.pack(torch.zeros(1, HIDDEN)),
        gate_up=block.shared[:1],
        down=block.shared[1:],
        top_k=1,
        renormalise=True,
    )
    weighed = (x @ gates[-1:].T).sigmoid() * (added(REFERENCE, alone, x) - 1)
    routed = replace(routed, router=REFERENCE.pack(gates[:-1].contiguous()))
    wanted = added(REFERENCE, routed, x) + weighed
    assert weighed.abs().max() > 0.02
    assert_close(added(REFERENCE, block, x), wanted, rtol=1e-5, atol=2e-5)
    ours = with_shared(experts_of(native, float32, form, renormalise=False), native, float32, of_shared)
    near = 1e-5 if form == "float" else 1e-3
    before = native.experts_read
    assert_close(added(native, ours, x), wanted, rtol=near, atol=2 * near)
    assert 0 < native.experts_read - before <= COUNT


def test_of_equal_experts_the_lower_is_chosen(native: NativeBackend) -> None:
    """Experts 2 and 7 have equal logits, so do all others."""
    router = torch.zeros(COUNT, HIDDEN)
    router[[2, 7]] = 1.0
    x = random(6, HIDDEN, seed=5).abs()
    for top in (1, 3):
        found, wanted = (
            added(backend, replace(block, router=backend.pack(router), top_k=top), x)
            for backend in (native, REFERENCE)
            for block in (experts_of(backend, torch.float32, "float", renormalise=True),)
        )
        assert_close(found, wanted, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("shared", [None, "float", "Q8_0"])
@pytest.mark.parametrize("form", ["float", "Q4_1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_every_batch(
    native: NativeBackend, dtype: torch.dtype, form: str, shared: str | None
) -> None:
    experts, x = experts_of(native, dtype, form, renormalise=True), random(600, HIDDEN, seed=6).to(dtype)
    experts = experts if shared is None else with_shared(experts, native, dtype, shared)
    together = added(native, experts, x)
    for first, last in ((0, 1), (7, 12), (3, 80), (250, 590)):
        assert torch.equal(added(native, experts, x[first:last].contiguous()), together[first:last])


def test_experts_of_several_k_formats_match_the_reference_and_have_the_same_bits_in_every_batch(
    native: NativeBackend,
) -> None:
    """Gate and up in formats of their own, as in files of mixed types: a call has activations for all of them."""
    size, count = 256, 5

    def made(backend: Backend) -> Experts:
        def gate_up(seed: int) -> PackedLinear:
            formats = ("Q4_K", "Q6_K", "Q8_0")
            parts = [random_blocks(formats[(seed + n) % 3], size, size, seed=seed + n) for n in (0, 1)]
            return backend.pack(stack_low_bit(parts))

        return Experts(
            router=backend.pack(random(count, size, seed=90) / 4),
            gate_up=tuple(gate_up(seed) for seed in range(count)),
            down=tuple(
                backend.pack(random_blocks(name, size, size, seed=20))
                for name in ("Q6_K", "Q5_K", "IQ4_XS", "Q4_K", "Q4_0")
            ),
            top_k=2,
            renormalise=True,
        )

    x, experts = random(90, size, seed=5), made(native)
    together, wanted = added(native, experts, x), added(REFERENCE, made(REFERENCE), x)
    assert_close(together, wanted, rtol=1e-3, atol=2e-3 * float(wanted.abs().max()))
    for first, last in ((0, 1), (7, 12), (3, 80)):
        assert torch.equal(added(native, experts, x[first:last].contiguous()), together[first:last])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("lengths", [(1,), (3, 1, 20)])
@pytest.mark.parametrize("form", ["float", "Q4_1"])
def test_layers_in_one_call_have_the_bits_of_single_operations(
    native: NativeBackend, form: str, lengths: tuple[int, ...], shared: bool
) -> None:
    """The middle one of three layers is a mixture."""
    experts = experts_of(native, torch.bfloat16, form, renormalise=True)
    experts = with_shared(experts, native, torch.bfloat16, form) if shared else experts
    stack = layer_stack(native, torch.bfloat16, "", 3)
    mixed = MixedFeedForward(
        attention_out=native.pack((random(HIDDEN, HEADS, seed=1) / HEADS**0.5).bfloat16()),
        norm=1 + random(HIDDEN, seed=2) / 4,
        eps=1e-5,
        experts=experts,
    )
    middle: DecoderLayer = replace(stack.layers[1], feed_forward=mixed)
    stack = replace(stack, layers=(stack.layers[0], middle, stack.layers[2]))
    separate = SeparateLayers(native, SeparateBlocks(native))
    found = run_layers(native, native.layers, stack, lengths, torch.bfloat16)
    assert torch.equal(found, run_layers(native, separate, stack, lengths, torch.bfloat16))


@pytest.mark.parametrize("kind", ["reordered", "mixed", "shared"])
def test_experts_that_no_single_call_takes_match_the_reference(native: NativeBackend, kind: str) -> None:
    """Two experts take their inputs in an order of their own, as GPTQ leaves them, or a shared one does; or one is
    kept in floats.
    """

    def unusual(backend: Backend) -> Experts:
        block = experts_of(backend, torch.float32, "Q8_0", renormalise=True)
        if kind == "shared":
            block = with_shared(block, backend, torch.float32, "Q8_0")
            assert block.shared is not None
            order = np.random.default_rng(1).permutation(HIDDEN).astype(np.int32)
            rows = replace(random_blocks("Q8_0", 4 * INNER, HIDDEN, seed=3), order=order)
            return replace(block, shared=(backend.pack(rows), block.shared[1]))
        gate_up, down = list(block.gate_up), list(block.down)
        if kind == "mixed":
            gate_up[4] = backend.pack(random(2 * INNER, HIDDEN, seed=4) / HIDDEN**0.5)
            down[6] = backend.pack(random(HIDDEN, INNER, seed=6) / INNER**0.5)
        else:
            for expert, products, sizes in ((4, gate_up, (2 * INNER, HIDDEN)), (6, down, (HIDDEN, INNER))):
                order = np.random.default_rng(expert).permutation(sizes[1]).astype(np.int32)
                products[expert] = backend.pack(replace(random_blocks("Q8_0", *sizes, seed=expert), order=order))
        return replace(block, gate_up=tuple(gate_up), down=tuple(down))

    x, usual = random(40, HIDDEN, seed=5), experts_of(native, torch.float32, "Q8_0", renormalise=True)
    found, wanted = (added(backend, unusual(backend), x) for backend in (native, REFERENCE))
    assert_close(found, wanted, rtol=1e-3, atol=2e-3)
    assert not torch.allclose(added(native, usual, x), wanted, atol=1e-2)
    block = unusual(native)
    together = added(native, block, x)
    assert torch.equal(added(native, block, x[7:12].contiguous()), together[7:12])
    mixed = MixedFeedForward(
        attention_out=native.pack(random(HIDDEN, HEADS, seed=1) / HEADS**0.5),
        norm=1 + random(HIDDEN, seed=2) / 4,
        eps=1e-5,
        experts=block,
    )
    stack = layer_stack(native, torch.float32, "", 2)
    stack = replace(stack, layers=(stack.layers[0], replace(stack.layers[1], feed_forward=mixed)))
    separate = SeparateLayers(native, SeparateBlocks(native))
    ours = run_layers(native, native.layers, stack, (3, 1, 20), torch.float32)
    assert torch.equal(ours, run_layers(native, separate, stack, (3, 1, 20), torch.float32))


@pytest.mark.parametrize("count, top", [(1, 1), (5, 5), (512, 10)])
def test_any_number_of_experts_matches_the_reference(native: NativeBackend, count: int, top: int) -> None:
    """One; all of them chosen by every row; hundreds, most of them chosen by none."""

    def made(backend: Backend) -> Experts:
        return Experts(
            router=backend.pack(random(count, 32, seed=1) / 4),
            gate_up=tuple(backend.pack(random(16, 32, seed=seed) / 6) for seed in range(count)),
            down=tuple(backend.pack(random(32, 8, seed=seed) / 3) for seed in range(count)),
            top_k=top,
            renormalise=False,
        )

    for rows in (0, 1, 30, 250):
        x = random(rows, 32, seed=5)
        found, wanted = (added(backend, made(backend), x) for backend in (native, REFERENCE))
        assert_close(found, wanted, rtol=1e-5, atol=2e-5)
        assert rows == 0 or not torch.allclose(wanted, torch.ones(rows, 32), atol=1e-2)
