"""Mixtures of experts on the native backend: against the reference, and the promise that a row's bits are its own.

Bugs these tests have been seen to catch: BUGS.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.interface.backend import Backend, SeparateBlocks, SeparateLayers
from faser.kernels.interface.blocks import DecoderLayer, Experts, MixedFeedForward
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


@pytest.mark.parametrize("form", ["float", "Q4_1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_every_batch(native: NativeBackend, dtype: torch.dtype, form: str) -> None:
    experts, x = experts_of(native, dtype, form, renormalise=True), random(90, HIDDEN, seed=6).to(dtype)
    together = added(native, experts, x)
    for first, last in ((0, 1), (7, 12), (3, 80)):
        assert torch.equal(added(native, experts, x[first:last].contiguous()), together[first:last])


@pytest.mark.parametrize("lengths", [(1,), (3, 1, 20)])
@pytest.mark.parametrize("form", ["float", "Q4_1"])
def test_layers_in_one_call_have_the_bits_of_single_operations(
    native: NativeBackend, form: str, lengths: tuple[int, ...]
) -> None:
    """The middle one of three layers is a mixture."""
    stack = layer_stack(native, torch.bfloat16, "", 3)
    mixed = MixedFeedForward(
        attention_out=native.pack((random(HIDDEN, HEADS, seed=1) / HEADS**0.5).bfloat16()),
        norm=1 + random(HIDDEN, seed=2) / 4,
        eps=1e-5,
        experts=experts_of(native, torch.bfloat16, form, renormalise=True),
    )
    middle: DecoderLayer = replace(stack.layers[1], feed_forward=mixed)
    stack = replace(stack, layers=(stack.layers[0], middle, stack.layers[2]))
    separate = SeparateLayers(native, SeparateBlocks(native))
    found = run_layers(native, native.layers, stack, lengths, torch.bfloat16)
    assert torch.equal(found, run_layers(native, separate, stack, lengths, torch.bfloat16))
