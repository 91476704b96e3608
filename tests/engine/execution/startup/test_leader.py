"""Rank 0 starts the others only for a model that they can share, and leaves none behind.

Planted bugs that these tests have caught: heads compared by the loader alone; ranks that are not ended after a
failed start; a warning for as many ranks as cores.
"""

import logging
import os
import resource
from pathlib import Path
from typing import Any

import psutil
import pytest

from faser.config.engine import EngineConfig
from faser.engine.build import build_engine
from faser.engine.execution.models.weights import WeightSource
from faser.engine.execution.startup.files import find_models
from faser.engine.execution.startup.leader import Ranks, warn_of_few_cores
from faser.errors import ConfigError, ModelError
from tests.engine.checkpoints.family_models import write_family_model
from tests.engine.test_gemma4_engine import FIELDS as GEMMA4
from tests.engine.test_states_engine import FIELDS as STATES

OLMOE = {"num_experts": 4, "num_experts_per_tok": 2}


def config_of(directory: Path, size: int) -> EngineConfig:
    return EngineConfig(
        model=str(directory),
        tensor_parallel_size=size,
        num_threads=1,
        backend="torch",
        kv_cache_memory=1 << 20,
        max_model_len=128,
        speculative_config={"policy": "off"},
    )


def quiet(_stage: str, _done: int, _total: int) -> None: ...


@pytest.mark.parametrize(
    "model_type, fields, size, problem",
    [
        ("qwen3", {}, 64, "tensor_parallel_size is 64; the model has 4 heads on 2 key-value heads"),
        ("qwen3", {"intermediate_size": 2}, 4, "tensor_parallel_size is 4; a network of the model has 2 channels"),
        ("olmoe", OLMOE, 2, "tensor_parallel_size is 2; this model normalises all its query heads together"),
        (
            "qwen3_5_text",
            STATES,
            2,
            "recurrent states, which ranks cannot share; tensor_parallel_size is 2, it",
        ),
        ("gemma4_text", GEMMA4, 2, "ranks cannot share it; tensor_parallel_size is 2, it must be 1"),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused_before_a_process_is_started(
    model_type: str, fields: dict[str, Any], size: int, problem: str, tmp_path: Path
) -> None:
    """find_models comes first, and knows it by the config."""
    write_family_model(tmp_path, model_type, fields)
    with pytest.raises(ConfigError, match=problem):
        find_models(config_of(tmp_path, size), tmp_path, quiet)


def test_a_start_that_fails_leaves_no_rank_behind(tiny_checkpoint: Path) -> None:
    before, started = set(psutil.Process().children()), set[psutil.Process]()

    def break_off(_directory: Path) -> WeightSource:
        started.update(psutil.Process().children())
        raise ModelError("the weights cannot be read")

    with pytest.raises(ModelError, match="the weights cannot be read"):
        build_engine(config_of(tiny_checkpoint, 2), tiny_checkpoint, quiet, sources=break_off)
    (rank,) = started - before
    assert not rank.is_running()


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_ranks_that_cannot_be_started_are_refused(tiny_checkpoint: Path, spare: int) -> None:
    """Depending on what is open, the limit is met by their file or by their first process."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_descriptor = os.dup(0)
    os.close(next_descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_descriptor + spare, limits[1]))
    try:
        with pytest.raises(
            ConfigError, match=r"(rank 1 cannot be started|no file to meet at): .*Too many open files"
        ):
            Ranks(config_of(tiny_checkpoint, 2), tiny_checkpoint)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("ranks, warned", [(4, False), (5, True)])
def test_ranks_that_share_cores_are_warned_of(ranks: int, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "faser.engine"):
        warn_of_few_cores(ranks, 4)
    assert [each.getMessage()[:76] for each in caplog.records] == (
        ["tensor_parallel_size puts 5 ranks on this machine, where FASER has 4 cores: "] if warned else []
    )
