"""What `build` puts together: parts that fit the configuration, and planes that share no object."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

from faser.config.engine import EngineConfig
from faser.engine.build import Built, build, native_acceptance
from faser.engine.contract.step_times import Role, StepTimes
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.execution.drafting.drafter import Drafter
from faser.errors import ConfigError

TIMES = StepTimes.proportional(step_s=0.01, pass_s=1e-3, text_s=1e-6)


def built(directory: Path, speculation: dict[str, Any], **more: Any) -> Built:
    config = EngineConfig(
        model=str(directory),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        kv_cache_memory=1 << 20,
        speculative_config=speculation,
    )
    return build(config, directory, lambda _stage, _done, _total: None, **more)


def test_the_info_describes_the_loaded_model(tiny_checkpoint: Path) -> None:
    info = built(tiny_checkpoint, {"policy": "off"}).info
    assert (info.max_model_len, info.dtype, info.device) == (128, "float32", "cpu")
    assert info.num_blocks * info.block_size >= 128
    assert info.kv_cache_bytes <= 1 << 20
    assert info.weight_bytes == 4 * info.num_parameters


def test_weights_are_read_by_one_thread_of_torch_where_the_native_kernels_have_threads(
    tiny_checkpoint: Path,
) -> None:
    """Two that wait for each other take ten times as long next to another program, such as a second server."""
    threads: set[int] = set()

    def report(stage: str, _done: int, _total: int) -> None:
        if stage == "loading weights":
            threads.add(torch.get_num_threads())

    config = EngineConfig(
        model=str(tiny_checkpoint),
        backend="native",
        kv_cache_memory=1 << 20,
        speculative_config={"policy": "off"},
        num_threads=2,
    )
    before = torch.get_num_threads()
    try:
        build(config, tiny_checkpoint, report)
    finally:
        torch.set_num_threads(before)
    assert threads == {1}


def test_an_engine_that_never_drafts_measures_nothing(tiny_checkpoint: Path) -> None:
    """No stage of the start is called measuring, and there is no cost model."""
    stages: list[str] = []
    config = EngineConfig(
        model=str(tiny_checkpoint), kv_cache_memory=1 << 20, speculative_config={"policy": "off"}
    )
    found = build(config, tiny_checkpoint, lambda stage, _done, _total: stages.append(stage))
    assert found.costs is None
    assert not any("measuring" in stage for stage in stages)


def test_given_step_times_become_the_control_planes_cost_model(tiny_checkpoint: Path) -> None:
    found = built(tiny_checkpoint, {}, step_times=TIMES)
    assert found.costs is not None
    assert found.costs.tables == TIMES.tables
    found.costs.observe(Role.STEP, 1.0, 2.0)
    assert TIMES.tables[Role.STEP].seconds_at(1) == 0.01


def test_two_engines_of_the_same_step_times_follow_their_own_steps(tiny_checkpoint: Path) -> None:
    one, other = (built(tiny_checkpoint, {}, step_times=TIMES).costs for _ in range(2))
    assert one is not None
    assert other is not None
    one.observe(Role.STEP, 1.0, 2.0)
    assert other.factor(Role.STEP) == 1.0


def test_a_draft_model_has_a_runner_of_its_own(tiny_checkpoint: Path) -> None:
    with_model = {"method": "draft_model", "model": str(tiny_checkpoint)}
    found = built(tiny_checkpoint, with_model, step_times=TIMES)
    assert found.draft_runner is not None
    assert found.draft_runner is not found.runner
    assert built(tiny_checkpoint, {"method": "ngram"}, step_times=TIMES).draft_runner is None


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_acceptance_is_estimated_natively_whatever_drafts(tiny_checkpoint: Path, method: str) -> None:
    """Planted: only where drafts come from text, so that a GPU with a draft model waited for Python."""
    model = {"model": str(tiny_checkpoint)} if method == "draft_model" else {}
    found = built(tiny_checkpoint, {"method": method, **model}, step_times=TIMES)
    control = found.engine._scheduler._speculation
    assert isinstance(control, SpeculationControl)
    assert control._acceptance.native is not None


def test_without_the_native_library_there_is_no_speculation() -> None:
    def missing() -> ctypes.CDLL:
        raise ConfigError("no C++ compiler found; install g++")

    message = (
        "estimates acceptance in native code: no C.. compiler found; install g..; or set --speculative-policy"
    )
    with pytest.raises(ConfigError, match=message):
        native_acceptance(missing)


def test_the_drafter_can_be_wrapped(tiny_checkpoint: Path) -> None:
    seen: list[Drafter] = []

    def wrapped(drafter: Drafter) -> Drafter:
        seen.append(drafter)
        return drafter

    built(tiny_checkpoint, {"method": "suffix"}, step_times=TIMES, wrap_drafter=wrapped)
    assert len(seen) == 1


def test_a_context_longer_than_the_models_is_refused(tiny_checkpoint: Path) -> None:
    config = EngineConfig(model=str(tiny_checkpoint), max_model_len=1 << 20)
    with pytest.raises(ConfigError, match="max-model-len is 1048576"):
        build(config, tiny_checkpoint, lambda _stage, _done, _total: None)
