"""Delta nets of the reference and of the native kernels against the formula in float64.

Refused drafts leave nothing behind: outputs and states have the same bits as without them.

Planted bugs that these tests have caught, in the native kernels and in the bookkeeping: a chunk that drafts
complete enters the kept state; accepted rows never enter it; one row too many does; inputs of refused rows push
out those before them; no room for drafted rows; a state that is not cleared for a new sequence; chunks that enter
the state by the rows that were computed, not by those that are known; inputs one position off; a row's own decay
in its own sum; queries not scaled; tiled heads read as if they followed each other.
"""

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.delta_net import DeltaNet, DeltaShape
from faser.kernels.interface.mixers import CHUNK
from faser.kernels.torch_backend import TorchBackend
from tests.kernels.interface.delta_nets import Layer, Life, Rows, Tokens, random_net

SHAPES = (
    DeltaShape(num_k_heads=2, num_v_heads=4, k_head_dim=16, v_head_dim=32, kernel=4),
    DeltaShape(num_k_heads=2, num_v_heads=6, k_head_dim=16, v_head_dim=16, kernel=3, tiled=True),
    DeltaShape(num_k_heads=3, num_v_heads=3, k_head_dim=48, v_head_dim=16, kernel=2),
    DeltaShape(num_k_heads=1, num_v_heads=2, k_head_dim=128, v_head_dim=128, kernel=4),
)
NUM_TOKENS = 75


def formula(tokens: Tokens, shape: DeltaShape, net: DeltaNet) -> Tensor:
    """[T, Hv Dv] float64, of one sequence from its beginning, written out."""
    x, rates = tokens.qkv.double(), tokens.rates.double()
    channels = x[:, : shape.channels]
    conv = torch.zeros_like(channels)
    for t in range(len(x)):
        for tap in range(shape.kernel):
            if (before := t - shape.kernel + 1 + tap) >= 0:
                conv[t] += channels[before] * net.conv[tap].double()
    conv = conv * conv.sigmoid()
    queries, keys = (
        each.view(len(x), shape.num_k_heads, shape.k_head_dim)
        for each in (conv[:, : shape.k_size], conv[:, shape.k_size : 2 * shape.k_size])
    )
    values = conv[:, 2 * shape.k_size :].view(len(x), shape.num_v_heads, shape.v_head_dim)
    found = torch.empty(len(x), shape.num_v_heads, shape.v_head_dim, dtype=torch.float64)
    for head in range(shape.num_v_heads):
        state = torch.zeros(shape.k_head_dim, shape.v_head_dim, dtype=torch.float64)
        of = head % shape.num_k_heads if shape.tiled else head // (shape.num_v_heads // shape.num_k_heads)
        for t in range(len(x)):
            key, query = (each[t, of] / (each[t, of].square().sum() + 1e-6).sqrt() for each in (keys, queries))
            beta = rates[t, head].sigmoid()
            slow = rates[t, shape.num_v_heads + head] + net.dt_bias[head].double()
            state = state * (net.decay[head].double() * torch.log1p(slow.exp())).exp()
            state = state + torch.outer(key, beta * (values[t, head] - key @ state))
            out = (query / shape.k_head_dim**0.5) @ state
            z = x[t, shape.channels + head * shape.v_head_dim :][: shape.v_head_dim]
            normed = out / (out.square().mean() + net.eps).sqrt() * net.norm.double()
            found[t, head] = normed * z * z.sigmoid()
    return found.flatten(1)


@pytest.fixture(params=["torch", "native"])
def backend(request: pytest.FixtureRequest, native: NativeBackend) -> Backend:
    return native if request.param == "native" else TorchBackend()


@cache
def case(shape: DeltaShape) -> tuple[DeltaNet, Tokens, Tensor]:
    """Return weights, inputs and what the formula says of them."""
    net, tokens = random_net(shape), Tokens.random(shape, NUM_TOKENS, torch.float32, 1)
    return net, tokens, formula(tokens, shape, net)


@pytest.mark.parametrize("sizes", [(), (1,) * NUM_TOKENS, (3, 14, 1, 15, 20)])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_are_those_of_the_formula(backend: Backend, shape: DeltaShape, sizes: Sequence[int]) -> None:
    """By chunks and row by row alike."""
    net, tokens, wanted = case(shape)
    found = Layer(backend, shape, net, num_slots=1, dtype=torch.float32).whole(tokens, sizes)
    assert_close(found.double(), wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_in_bfloat16_only_inputs_and_outputs_are_rounded(native: NativeBackend, shape: DeltaShape) -> None:
    net, tokens = random_net(shape), Tokens.random(shape, NUM_TOKENS, torch.bfloat16, 1)
    found = Layer(native, shape, net, num_slots=1, dtype=torch.bfloat16).whole(tokens, (30,))
    assert_close(found.double(), formula(tokens, shape, net), atol=1e-4, rtol=2**-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_every_step(
    native: NativeBackend, shape: DeltaShape, dtype: torch.dtype
) -> None:
    """Alone or among others, row by row or many at once, in whatever slot."""
    net = random_net(shape)
    some = [Tokens.random(shape, NUM_TOKENS, dtype, seed) for seed in range(3)]
    alone = [Layer(native, shape, net, num_slots=1, dtype=dtype).whole(each) for each in some]
    layer = Layer(native, shape, net, num_slots=4, dtype=dtype)
    for each, wanted in zip(some, alone, strict=True):
        assert torch.equal(layer.whole(each, (1,) * NUM_TOKENS, slot=2), wanted)
    rows_of: list[list[Tensor]] = [[], [], []]
    for start in range(0, NUM_TOKENS, 5):
        parts = [Rows(3 - i, start, each.part(start, start + 5)) for i, each in enumerate(some)]
        for outputs, new in zip(rows_of, layer.step(*parts), strict=True):
            outputs.append(new)
    for outputs, wanted in zip(rows_of, alone, strict=True):
        assert torch.equal(torch.cat(outputs), wanted)


@pytest.mark.parametrize("seed", range(6))
def test_refused_drafts_leave_no_bit_behind(native: NativeBackend, seed: int) -> None:
    """Outputs and states of a run without drafts, though drafts cross the ends of chunks and are refused."""
    shape, count = SHAPES[seed % len(SHAPES)], 300
    net = random_net(shape, seed)
    lives = []
    for slot in range(2):
        right, wrong = (
            Tokens.random(shape, length, torch.float32, 10 * slot + i) for i, length in ((0, count), (1, 350))
        )
        lives.append(Life(right, wrong, slot, seed))
    layer = Layer(native, shape, net, num_slots=2, dtype=torch.float32)
    while running := [each for each in lives if each.known < count]:
        for life, outputs in zip(running, layer.step(*(each.rows() for each in running)), strict=True):
            life.take(outputs)
    for life in lives:
        assert life.refused > 20
        plain = Layer(native, shape, net, num_slots=2, dtype=torch.float32)
        assert torch.equal(torch.cat(life.found), plain.whole(life.tokens, slot=life.slot))
        assert_same_state(layer, plain, shape, slot=life.slot, known=count)


def assert_same_state(some: Layer, other: Layer, shape: DeltaShape, *, slot: int, known: int) -> None:
    """To the bit: the state after whole chunks, the rows kept since then, and the inputs that the next row reads.

    The step that brings the chunks into the state is the next one, so it is made first.
    """
    following = Tokens.random(shape, 1, torch.float32, 99)
    assert torch.equal(*(layer.step(Rows(slot, known, following))[0] for layer in (some, other)))
    first = known + 1 - (known + 1) % CHUNK
    for name, rows in (
        ("state", None),
        ("keys", range(first, known + 1)),
        ("changes", range(first, known + 1)),
        ("decays", range(first, known + 1)),
        ("inputs", range(known + 2 - shape.kernel, known + 1)),
    ):
        a, b = (layer.cache.states.layers[1][name][slot] for layer in (some, other))
        if rows is not None:
            axis = 0 if name == "inputs" else 1
            at = torch.tensor([position % a.shape[axis] for position in rows], dtype=torch.int64)
            a, b = a.index_select(axis, at), b.index_select(axis, at)
        assert torch.equal(a, b), name


def test_a_slot_begins_anew_with_a_sequence(backend: Backend) -> None:
    shape = SHAPES[0]
    net, (first, second) = random_net(shape), (Tokens.random(shape, 40, torch.float32, seed) for seed in (1, 2))
    layer = Layer(backend, shape, net, num_slots=1, dtype=torch.float32)
    wanted = layer.whole(second, (7, 20))
    layer.whole(first)
    assert torch.equal(layer.whole(second, (7, 20)), wanted)


@pytest.mark.parametrize(("start", "known"), [(41, 40), (31, 38), (8, 40)])
def test_a_sequence_cannot_go_on_where_its_state_is_not(start: int, known: int) -> None:
    """Ahead of it, or in a chunk before the one that it can compute again."""
    shape = SHAPES[0]
    layer = Layer(TorchBackend(), shape, random_net(shape), num_slots=1, dtype=torch.float32)
    layer.step(Rows(0, 0, Tokens.random(shape, known, torch.float32, 1)))
    with pytest.raises(AssertionError, match="tokens far"):
        layer.step(Rows(0, start, Tokens.random(shape, 1, torch.float32, 1)))
