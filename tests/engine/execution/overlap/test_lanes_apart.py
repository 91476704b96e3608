"""Two lanes share no mutable state: no buffers, no bookkeeping, no random generators, with any drafter.

Shared on purpose: the block table and the sampling parameters by slot, which are written between steps only; the
thread pool of all cores, which no lane uses; the native library, which is code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from faser.config.speculation import SpeculationConfig
from faser.engine.execution.drafting.draft_model import DraftKvCache
from faser.engine.execution.drafting.registry import DrafterParts, DraftModelParts, make_drafter
from faser.engine.execution.overlap.partition import Serial
from faser.engine.execution.pruning import EarlyPruning
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.verify import make_verifier
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.interface.backend import Backend
from faser.kernels.torch_backend import TorchBackend
from tests.engine.execution.drafting.shared_state import shared
from tests.engine.execution.pruning_world import (
    BLOCK_SIZE,
    CAP,
    MAX_LEN,
    MAX_ROWS,
    NUM_BLOCKS,
    NUM_SLOTS,
    RandomGate,
    World,
    make_world,
    write_pair,
)

CONFIGS: dict[str, dict[str, Any]] = {
    "sample_and_match": {"method": "draft_model"},
    "greedy": {"method": "draft_model", "draft_sample_method": "greedy"},
    "auto": {"method": "auto"},
}
BACKENDS = ("native", "torch")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest, kernel_cache: Path) -> Backend:
    if request.param == "torch":
        return TorchBackend()
    return NativeBackend(library_path(cache_dir=kernel_cache), num_threads=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """The objects of each lane. on_purpose: shared on purpose, see the module."""

    verify: list[object]
    draft: list[object]
    on_purpose: list[object]


def sides(world: World, given: dict[str, Any]) -> Sides:
    """As the engine assembles them."""
    config = SpeculationConfig(model="drafter", policy="fixed", num_speculative_tokens=CAP, **given)
    table = BlockTable(NUM_SLOTS, MAX_LEN // BLOCK_SIZE)
    sampler = Sampler(NUM_SLOTS, world.target.vocab_size, (), world.target.sampling_kernels)
    parts = DrafterParts(
        table=table,
        sampling=sampler.state,
        max_rows=MAX_ROWS,
        model=DraftModelParts(
            runner=world.drafter,
            kv=DraftKvCache(table, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
            max_positions=MAX_LEN,
        ),
    )
    drafter = make_drafter(config, parts)
    pruning = EarlyPruning(RandomGate(0), layer=1)
    lanes = world.lanes
    backends = [None, None] if lanes is None else [lanes.target, lanes.draft]
    return Sides(
        verify=[world.target, sampler, make_verifier(config, sampler), pruning, table, backends[0]],
        draft=[drafter, world.drafter, table, backends[1]],
        on_purpose=[
            table,
            sampler.state,
            *([backends[0]._full] if isinstance(backends[0], NativeBackend) else []),
        ],
    )


@pytest.mark.parametrize("config", CONFIGS)
def test_lanes_share_no_mutable_state(pair: tuple[Path, Path], backend: Backend, config: str) -> None:
    found = sides(make_world(pair, backend, Serial()), CONFIGS[config])
    assert shared(found.verify, found.draft, on_purpose=found.on_purpose) == []


def test_lanes_on_one_backend_are_caught(pair: tuple[Path, Path], kernel_cache: Path) -> None:
    """Both would use its sampling kernels, its threads and its handles at the same time."""
    backend = NativeBackend(library_path(cache_dir=kernel_cache), num_threads=1)
    found = sides(make_world(pair, backend), CONFIGS["sample_and_match"])
    common = shared(found.verify, found.draft, on_purpose=found.on_purpose)
    kernels = type(backend.sampling_kernels).__name__
    assert {"NativeBackend", kernels, "LanePools"} <= {each.split()[0] for each in common}


def test_lanes_with_one_drafting_and_verifying_model_are_caught(pair: tuple[Path, Path], backend: Backend) -> None:
    """The buffers of activations belong to the model."""
    world = make_world(pair, backend, Serial())
    found = sides(World(target=world.target, drafter=world.target, lanes=world.lanes), CONFIGS["greedy"])
    common = shared(found.verify, found.draft, on_purpose=found.on_purpose)
    assert any(each.startswith("memory of Tensor") for each in common)


def of_a_closure(state: object) -> Callable[[], object]:
    return lambda: state


SHARINGS: dict[str, Callable[[], tuple[object, object]]] = {
    "two views": lambda: (lambda whole: (whole[:5], whole[4:]))(torch.zeros(8)),
    "a column and a row": lambda: (lambda whole: (whole[:, 1], whole[2]))(torch.zeros(4, 4)),
    "a tensor of an array": lambda: (lambda whole: (whole, torch.from_numpy(whole[3:])))(np.zeros(8)),
    "a generator": lambda: (lambda rng: ((rng,), [rng]))(np.random.default_rng(0)),
    "a list in a closure": lambda: (lambda state: (of_a_closure(state), state))([1]),
    "a bound method": lambda: (lambda table: (table.clear, table))(BlockTable(1, 1)),
}
APART: dict[str, Callable[[], tuple[object, object]]] = {
    "two halves": lambda: (lambda whole: (whole[:4], whole[4:]))(torch.zeros(8)),
    "two arrays": lambda: (np.zeros(3), np.zeros(3)),
    "values": lambda: (("a", 1, np.int64), ("a", 1, np.int64)),
}


@pytest.mark.parametrize("sharing", SHARINGS)
def test_shared_state_is_found_however_it_is_held(sharing: str) -> None:
    one, other = SHARINGS[sharing]()
    assert shared([one], [other]) != []


@pytest.mark.parametrize("apart", APART)
def test_separate_state_does_not_count_as_shared(apart: str) -> None:
    one, other = APART[apart]()
    assert shared([one], [other]) == []
