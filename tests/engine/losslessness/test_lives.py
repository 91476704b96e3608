"""Whatever happens in an engine that prunes and drafts ahead, everybody hears what a plain engine says.

Tokens, scores, prompt scores and endings, to the bit; float32 on the native kernels.

Planted bugs that these lives have caught: penalties that do not see the drafted tokens before a row; one number
for all rows of a sequence; blocks for a draft that never reach the data plane's table; rows that leave and take a
neighbour's place; the last row taken one too far after others left; scores in the wrong order; accepted tokens
counted twice by the sampler. A chunk in the wrong order is no bug: with point masses it costs acceptance only.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from faser.config.speculation import SpeculationConfig
from faser.engine.control.speculation.overlap import OverlapOptions
from faser.engine.engine import Engine
from faser.engine.execution.overlap.partition import Cores
from faser.engine.execution.pruning import EarlyPruning
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from tests.engine.execution.pruning_world import (
    CAP,
    NUM_LAYERS,
    RandomGate,
    World,
    make_engine,
    make_world,
    no_ranks,
    write_pair,
)
from tests.engine.losslessness.lives import EOS, alone, check, live, random_life
from tests.fakes import RandomPolicy

NUM_BLOCKS = 12  # two of the longest fill it
NOISE = 0.01  # of the drafter's weights: most tokens are right, so that chunks follow on chunks
DRAFTERS: tuple[dict[str, Any], ...] = (
    {"method": "draft_model"},
    {"method": "draft_model", "draft_sample_method": "greedy"},
    {"method": "auto"},
)

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two lanes take two cores")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> World:
    backend = NativeBackend(library_path(cache_dir=kernel_cache), num_threads=1)
    return make_world(write_pair(tmp_path_factory.mktemp("pair"), noise=NOISE), backend, Cores())


def plain(world: World) -> Engine:
    return make_engine(world, SpeculationConfig(policy="off"), None, eos_token_ids=EOS, num_blocks=NUM_BLOCKS)


def everything_on(world: World, seed: int) -> tuple[Engine, EarlyPruning]:
    """Any lengths, any cuts, any rows pruned; drafts made beside steps, decided anew every third step."""
    config = SpeculationConfig(
        model="beside", policy="fixed", num_speculative_tokens=CAP, **DRAFTERS[seed % len(DRAFTERS)]
    )
    pruning = EarlyPruning(RandomGate(seed), layer=seed % (NUM_LAYERS + 1), ranks=no_ranks)
    engine = make_engine(
        world,
        config,
        pruning,
        policy=RandomPolicy(seed) if seed % 2 else None,
        overlap=OverlapOptions(name="cores", share=0.5, mode="on", every=3),
        eos_token_ids=EOS,
        num_blocks=NUM_BLOCKS,
    )
    return engine, pruning


def lead(world: World, seeds: range) -> tuple[int, int, int, int]:
    """Lead these lives and compare; overlapped steps, accepted tokens, pruned rows and preemptions in all."""
    overlapped = accepted = pruned = preempted = 0
    for seed in seeds:
        life = random_life(seed)
        engine, pruning = everything_on(world, seed)
        check(life, live(engine, life), alone(plain(world), life.asked))
        stats = engine.stats()
        assert stats.speculation is not None
        overlapped += dict(stats.speculation.mode_steps)["cores"]
        accepted += sum(each.accepted for each in stats.speculation.methods)
        pruned += pruning.stats.pruned_rows
        preempted += stats.num_preemptions
    return overlapped, accepted, pruned, preempted


def test_whatever_happens_everybody_hears_what_a_plain_engine_says(world: World) -> None:
    assert min(lead(world, range(6))) > 0


@pytest.mark.slow
@pytest.mark.full
def test_whatever_happens_in_many_more_lives_everybody_hears_what_a_plain_engine_says(
    world: World, full: bool
) -> None:
    assert min(lead(world, range(6, 306 if full else 18))) > 0
