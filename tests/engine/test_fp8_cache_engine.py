"""Engines whose keys and values are 8-bit floats: built from a config, and over recordings on the emulated device.

Bugs these tests have been seen to catch: caches of the activations' type all the same.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from faser.config.engine import EngineConfig
from faser.engine.build import build_engine
from faser.engine.contract.step_times import StepTimes
from faser.engine.engine import Engine
from faser.errors import ConfigError
from faser.kernels.factory import make_backend
from faser.kernels.interface.fp8 import FP8
from faser.types import Request, SamplingParams
from tests.engine.execution.runner.test_graph_engine import NUM_TOKENS, SIZES, answers, engine_over
from tests.engine.execution.runner.test_graph_runner import Side, write_heads_of_64
from tests.kernels.layouts import attention_shape, kv_shape

MEMORY = 1 << 20
OFF = {"policy": "off"}
STEP_TIMES = StepTimes.proportional(step_s=1e-2, pass_s=1e-3)


def built(directory: Path, kv_cache_dtype: str, speculation: Mapping[str, Any]) -> tuple[Engine, int]:
    """An engine on the torch backend, and the blocks it has."""
    config = EngineConfig(
        backend="torch",
        device="cpu",
        dtype="float32",
        num_threads=1,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        kv_cache_memory=MEMORY,
        speculative_config=speculation,
    )
    engine, info = build_engine(config, directory, lambda *_: None, step_times=STEP_TIMES)
    assert MEMORY // 2 < info.kv_cache_bytes <= MEMORY
    return engine, info.num_blocks


def greedy(engine: Engine, rounds: int = 1) -> list[list[int]]:
    """Answers to three prompts that begin alike; in a second round their beginning is found in the cache."""
    said: dict[str, list[int]] = {}
    names = []
    for again in range(rounds):
        for i in range(3):
            names.append(f"{again} {i}")
            engine.add(
                Request(
                    request_id=names[-1],
                    prompt_token_ids=(*range(3, 25), 30 + i),
                    sampling=SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, seed=i),
                    arrival_s=0.0,
                )
            )
        while engine.has_work():
            for delta in engine.step():
                assert delta.error is None, delta.error
                said.setdefault(delta.request_id, []).extend(delta.token_ids)
    return [said[name] for name in names]


def test_drafts_and_hits_in_the_cache_change_no_answer(tiny_checkpoint: Path) -> None:
    plain, num_blocks = built(tiny_checkpoint, "fp8", OFF)
    wanted = greedy(plain)
    drafting = {
        "method": "draft_model",
        "model": str(tiny_checkpoint),
        "policy": "fixed",
        "num_speculative_tokens": 3,
    }
    engine, shared = built(tiny_checkpoint, "fp8", drafting)
    assert greedy(engine, rounds=2) == wanted * 2
    assert shared == num_blocks // 2  # the draft model has a cache of its own, of the same type


def test_a_quarter_of_float32_is_four_times_the_blocks(tiny_checkpoint: Path) -> None:
    (_, wide), (_, narrow) = (built(tiny_checkpoint, each, OFF) for each in ("auto", "fp8"))
    assert narrow == 4 * wide


@pytest.mark.usefixtures("one_thread")
def test_recorded_steps_over_8_bit_keys_and_values_answer_as_eager_ones(tmp_path: Path) -> None:
    checkpoint = write_heads_of_64(tmp_path)
    eager, recorded = Side(checkpoint), Side(checkpoint)
    for side in (eager, recorded):
        side.kv = replace(side.kv, dtype=FP8)
    wanted = answers(engine_over(eager, eager.eager(), schedules_async=False))

    found = answers(engine_over(recorded, recorded.graph_runner(SIZES), schedules_async=True))

    assert {name: len(token_ids) for name, token_ids in found.items()} == dict.fromkeys(wanted, NUM_TOKENS)
    assert sum(found[name] == wanted[name] for name in wanted) >= len(wanted) - 2


def test_the_native_backend_refuses_8_bit_keys_and_values_by_name(own_cache: Path) -> None:
    try:
        native = make_backend("native", "cpu", num_threads=1, cache_dir=own_cache / "kernels")
    except ConfigError:
        pytest.skip("there is no compiler")
    with pytest.raises(ConfigError, match=r"the native backend .* the KV cache is float8_e4m3fn"):
        native.allocate_kv(kv_shape(attention_shape(1, 1, 16), 1, torch.float8_e4m3fn))
