"""Delta nets of the GPU against the formula in float64, in Triton's interpreter, which rounds no factor.

Planted bugs that these tests have caught: a chunk that drafts complete enters the state; rows that are kept are
read one position off; the last row's decay left out of a chunk's; inputs of earlier steps left out of the
convolution; changes that are not solved for; padding rows that belong to a sequence.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from faser.errors import EngineError
from faser.kernels.cuda.triton.delta_net import delta_net
from faser.kernels.interface.delta_net import DeltaNet, DeltaShape
from faser.kernels.interface.mixers import NUMBERS, LayerStates, Mixer, StateShape, StateStep, TorchStates
from faser.kernels.torch_backend import TorchBackend
from tests.kernels.interface.delta_nets import Layer, Life, Rows, Tokens, random_net
from tests.kernels.interface.test_delta_net import formula

SHAPES = (
    DeltaShape(num_k_heads=1, num_v_heads=2, k_head_dim=16, v_head_dim=32, kernel=4),
    DeltaShape(num_k_heads=2, num_v_heads=4, k_head_dim=16, v_head_dim=16, kernel=3, tiled=True),
    DeltaShape(num_k_heads=1, num_v_heads=1, k_head_dim=48, v_head_dim=80, kernel=2),
)
NUM_TOKENS = 37


class TritonStates(TorchBackend):
    """The reference, but for delta nets."""

    def mix(self, x: Tensor, rates: Tensor | None, mixer: Mixer, layer: int, step: StateStep, out: Tensor) -> None:
        assert isinstance(mixer, DeltaNet)
        assert rates is not None
        delta_net(x, rates, mixer, step.states.layers[layer], torch.from_numpy(step.numbers), out)


@pytest.mark.parametrize("sizes", [(), (3, 14, 1, 15), (1,) * 20])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.full(but=("shape0-sizes0", "shape1-sizes1", "shape2-sizes0"))
def test_outputs_are_those_of_the_formula(shape: DeltaShape, sizes: Sequence[int]) -> None:
    net, tokens = random_net(shape), Tokens.random(shape, NUM_TOKENS, torch.float32, 1)
    found = Layer(TritonStates(), shape, net, num_slots=1, dtype=torch.float32).whole(tokens, sizes)
    assert_close(found.double(), formula(tokens, shape, net), atol=2e-5, rtol=2e-5)


def test_in_bfloat16_only_inputs_and_outputs_are_rounded() -> None:
    """The interpreter rounds to it towards zero."""
    shape = SHAPES[0]
    net, tokens = random_net(shape), Tokens.random(shape, NUM_TOKENS, torch.bfloat16, 1)
    found = Layer(TritonStates(), shape, net, num_slots=1, dtype=torch.bfloat16).whole(tokens, (30,))
    assert_close(found.double(), formula(tokens, shape, net), atol=1e-4, rtol=2**-7)


def test_refused_drafts_leave_outputs_and_states_of_a_run_without_drafts() -> None:
    """To the bit, of two sequences that share steps, though drafts cross the ends of chunks."""
    shape, count = SHAPES[0], 40
    net = random_net(shape)
    lives = [
        Life(
            Tokens.random(shape, count, torch.float32, 10 * slot),
            Tokens.random(shape, count + 40, torch.float32, 10 * slot + 1),
            slot,
            seed=10,
        )
        for slot in range(2)
    ]
    layer = Layer(TritonStates(), shape, net, num_slots=2, dtype=torch.float32)
    while running := [each for each in lives if each.known < count]:
        for life, outputs in zip(running, layer.step(*(each.rows() for each in running)), strict=True):
            life.take(outputs)
    for life in lives:
        assert life.refused > 5
        plain = Layer(TritonStates(), shape, net, num_slots=2, dtype=torch.float32)
        wanted = plain.whole(life.tokens, (7, 30), slot=life.slot)
        assert torch.equal(torch.cat(life.found), wanted)


def test_a_chunk_that_refused_drafts_would_complete_does_not_enter_the_state() -> None:
    """States last for longer than a chunk here."""
    shape, net = SHAPES[0], replace(random_net(SHAPES[0]), decay=torch.full((2,), -0.01))
    right, wrong = (Tokens.random(shape, 40, torch.float32, seed) for seed in (1, 2))
    drafting, plain = (Layer(TritonStates(), shape, net, num_slots=1, dtype=torch.float32) for _ in range(2))
    drafting.step(Rows(0, 0, right.part(0, 30)))
    drafting.step(Rows(0, 30, right.part(30, 31).then(wrong.part(31, 34)), num_drafts=3))
    (found,) = drafting.step(Rows(0, 31, right.part(31, 40)))
    assert torch.equal(found, plain.whole(right, (30, 1))[31:])


def layer_states(shape: DeltaShape, num_slots: int) -> LayerStates:
    states = StateShape(layers=(shape,), num_slots=num_slots, most_drafts=3, dtype=torch.float32)
    (found,) = filter(None, TorchStates(states, torch.device("cpu")).layers)
    return found


def test_padding_keeps_nothing_and_harms_nothing() -> None:
    """Of a graph with room for more rows and sequences than a step has."""
    shape, net = SHAPES[1], random_net(SHAPES[1])
    tokens = Tokens.random(shape, 20, torch.float32, 1)
    plain, padded = (layer_states(shape, 2) for _ in range(2))
    step = torch.tensor([[1], [0], [0], [20], [16], [0]])
    wanted = torch.empty(20, shape.q_size)
    delta_net(tokens.qkv, tokens.rates, net, plain, step, wanted)
    numbers = torch.zeros(NUMBERS, 4, dtype=torch.int64)
    numbers[:, :1], numbers[5, 1:] = step, 1 << 40
    more = tokens.then(Tokens.random(shape, 4, torch.float32, 2))
    found = torch.full((24, shape.q_size), 7.0)
    delta_net(more.qkv, more.rates, net, padded, numbers[:, :3], found)
    assert torch.equal(found[:20], wanted)
    assert (found[20:] == 7).all()
    for one, other in zip(*((each.state, each.inputs, *each.rows) for each in (plain, padded)), strict=True):
        assert one.abs().max() > 0
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (replace(SHAPES[0], k_head_dim=24), "a head has 24 channels"),
        (replace(SHAPES[0], num_k_heads=2), "qkv has shape"),
    ],
)
def test_what_does_not_fit_is_named(other: DeltaShape, message: str) -> None:
    shape = SHAPES[0]
    tokens, numbers = Tokens.random(shape, 2, torch.float32, 1), torch.zeros(NUMBERS, 1, dtype=torch.int64)
    with pytest.raises(EngineError, match=message):
        delta_net(
            tokens.qkv,
            tokens.rates,
            replace(random_net(shape), shape=other),
            layer_states(shape, 1),
            numbers,
            torch.empty(2, 64),
        )
