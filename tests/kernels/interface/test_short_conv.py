"""Short convolutions: a formula as oracle, steps of any size, drafts that are refused, snapshots.

Planted bugs that these tests have caught: a column late; products of refused rows kept; the last rows of a long
step kept at wrong places; rows before the first one that are not zero.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from faser.engine.execution.runner.state_cache import StateCache
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.mixers import CHUNK, LayerStates, Mixer, StateShape, StateStep
from faser.kernels.interface.shapes import RowLayout
from faser.kernels.interface.short_conv import ConvShape, ShortConv
from faser.kernels.torch_backend import TorchBackend

MOST_DRAFTS = 5
SHAPE = ConvShape(channels=144, kernel=3)  # more than one piece of work, and part of another
NUM_TOKENS = 60


@pytest.fixture(params=["torch", "native"])
def backend(request: pytest.FixtureRequest, kernel_cache: Path) -> Backend:
    if request.param == "torch":
        return TorchBackend(torch.device("cpu"))
    return NativeBackend(library_path(cache_dir=kernel_cache), num_threads=2)


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


class OtherShape:
    """Sizes of SHAPE, under a type that no backend knows."""

    kind: ClassVar[str] = "other convolutions"
    columns, q_size, rate_columns = SHAPE.columns, SHAPE.q_size, 0
    kernel, channels = SHAPE.kernel, SHAPE.channels
    state_size: tuple[int, ...] = (0,)
    row_sizes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class WithoutKernels:
    """A mixer that no backend has kernels for."""

    shape: OtherShape
    net: ShortConv

    def mix(self, x: Tensor, rates: Tensor | None, held: LayerStates, step: StateStep, out: Tensor) -> None:
        self.net.mix(x, rates, held, step, out)


class Layer:
    """A short convolution, the second of two layers, and the inputs that two slots keep."""

    def __init__(
        self, backend: Backend, dtype: torch.dtype, num_snapshots: int = 0, *, has_kernels: bool = True
    ) -> None:
        self.backend, self.dtype = backend, dtype
        self.net = ShortConv(shape=SHAPE, conv=random(SHAPE.kernel, SHAPE.channels))
        self.mixer: Mixer = self.net if has_kernels else WithoutKernels(OtherShape(), self.net)
        states = StateShape(
            layers=(None, self.mixer.shape),
            num_slots=2,
            most_drafts=MOST_DRAFTS,
            dtype=dtype,
            num_snapshots=num_snapshots,
        )
        self.cache = StateCache(backend, states)

    def step(self, start: int, bcx: Tensor, *, num_drafts: int = 0, slot: int = 1) -> Tensor:
        layout = RowLayout(
            query_start=torch.tensor([0, len(bcx)], dtype=torch.int32),
            seq_len=torch.tensor([start + len(bcx)], dtype=torch.int32),
            positions=torch.empty(0, dtype=torch.int32),
            block_table=torch.empty(0, dtype=torch.int32),
            slots=[slot],
            num_drafts=[num_drafts],
        )
        out = torch.full((len(bcx), SHAPE.channels), torch.nan, dtype=self.dtype)
        self.backend.mix(bcx.to(self.dtype), None, self.mixer, 1, self.cache.begin(layout), out)
        return out


def expected(bcx: Tensor, conv: Tensor) -> Tensor:
    """Return the outputs of a whole sequence, in float64."""
    b, c, x = bcx.double().chunk(3, -1)
    padded = torch.cat((torch.zeros(SHAPE.kernel - 1, SHAPE.channels), b * x))
    return c * sum(conv.double()[j] * padded[j : j + len(x)] for j in range(SHAPE.kernel))


@pytest.mark.parametrize("sizes", [(NUM_TOKENS,), (1, 1, 1, 30, 27), (17, 16, 1, 26)])
def test_steps_of_any_size_compute_the_formula(sizes: tuple[int, ...], backend: Backend) -> None:
    layer, bcx = Layer(backend, torch.float32), random(NUM_TOKENS, SHAPE.columns, seed=1)
    layer.step(0, random(9, SHAPE.columns, seed=2))  # a sequence that had the slot before
    layer.step(0, random(9, SHAPE.columns, seed=3), slot=0)  # a neighbour
    parts = torch.split(bcx, list(sizes))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    found = torch.cat([layer.step(start, part) for start, part in zip(starts, parts, strict=True)])
    torch.testing.assert_close(found.double(), expected(bcx, layer.net.conv), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_refused_drafts_leave_no_trace(dtype: torch.dtype, backend: Backend) -> None:
    """Bit for bit, however many of them were accepted."""
    bcx, wrong = random(NUM_TOKENS, SHAPE.columns, seed=1), random(NUM_TOKENS, SHAPE.columns, seed=2)
    whole = Layer(backend, dtype).step(0, bcx)
    layer = Layer(backend, dtype)
    found, known = [layer.step(0, bcx[:4])], 4
    while known + 1 + MOST_DRAFTS < NUM_TOKENS:
        right = known % (MOST_DRAFTS + 1)  # drafts that are accepted
        rows = torch.cat((bcx[known : known + 1 + right], wrong[known + 1 + right : known + 1 + MOST_DRAFTS]))
        found.append(layer.step(known, rows, num_drafts=MOST_DRAFTS)[: 1 + right])
        known += 1 + right
    assert torch.equal(torch.cat(found), whole[:known])


def test_a_snapshot_has_the_inputs_before_its_end(backend: Backend) -> None:
    layer, bcx = Layer(backend, torch.float32, num_snapshots=1), random(NUM_TOKENS, SHAPE.columns, seed=1)
    whole = layer.step(0, bcx[: CHUNK + 7])
    layer.cache.save(1, 0, CHUNK)
    layer.cache.restore(0, 0)
    assert torch.equal(layer.step(CHUNK, bcx[CHUNK : CHUNK + 7], slot=0), whole[CHUNK:])


def test_a_mixer_without_kernels_is_computed_in_torch_with_its_states(backend: Backend) -> None:
    bcx = random(NUM_TOKENS, SHAPE.columns, seed=1)
    layer = Layer(backend, torch.float32, num_snapshots=1, has_kernels=False)
    layers = (layer, Layer(TorchBackend(), torch.float32, num_snapshots=1))
    for first, last in ((0, CHUNK + 7), (CHUNK + 7, CHUNK + 8)):
        found, wanted = (each.step(first, bcx[first:last]) for each in layers)
        assert torch.equal(found, wanted)
    layer.cache.save(1, 0, CHUNK)
    layer.cache.restore(0, 0)
    found, wanted = (each.step(CHUNK, bcx[CHUNK : CHUNK + 7], slot=i) for i, each in enumerate(layers))
    assert torch.equal(found, wanted)
