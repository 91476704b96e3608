"""Engines whose drafter is a low-bit copy of the model that reads and writes the model's KV cache.

Oracle: the engine without speculation, token for token, with a KV pool that is too small for all sequences. In
float32, under every policy, it is in losslessness/test_token_equality.py.

Planted bugs that these tests have caught: a draft that begins one position early, so that the copy overwrites what
the model computed of a committed token; a prefix cache that takes draft tokens for computed ones.
"""

from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from faser.config.engine import EngineConfig
from faser.engine.build import Built, build
from faser.engine.contract.step_times import StepTimes
from faser.engine.engine import Engine
from faser.errors import ConfigError
from faser.types import Request, SamplingParams
from tests.checkpoints import llama_shapes, random_weights, tiny_llama_config, write_checkpoint
from tests.engine.checkpoints.gguf.gguf_files import write_gguf

STEP_TIMES = StepTimes.proportional(step_s=1e-2, pass_s=1e-3)
COPY = {"method": "self_quantized", "bits": 4}


def built(path: Path, speculation: dict[str, Any], **settings: Any) -> Built:
    chosen: dict[str, Any] = {
        "backend": "native",
        "device": "cpu",
        "num_threads": 2,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "kv_cache_memory": 1 << 20,
        "speculative_config": speculation,
    }
    return build(EngineConfig(**chosen | settings), path, lambda *_: None, step_times=STEP_TIMES)


def answers(engine: Engine, temperature: float) -> list[tuple[int, ...]]:
    """Two turns of eight conversations. Prompts begin alike, so that blocks are shared."""
    lines = [(*range(3 + i // 2, 36), 40 + i) for i in range(8)]
    for turn, most in enumerate((60, 12)):
        said: dict[str, list[int]] = {}
        for i, line in enumerate(lines):
            engine.add(
                Request(
                    request_id=f"{turn} {i}",
                    prompt_token_ids=line,
                    sampling=SamplingParams(temperature=temperature, max_tokens=most + i, ignore_eos=True, seed=i),
                    arrival_s=float(i),
                )
            )
        while engine.has_work():
            for delta in engine.step():
                assert delta.error is None, delta.error
                said.setdefault(delta.request_id, []).extend(delta.token_ids)
        lines = [(*line, *said[f"{turn} {i}"], 7) for i, line in enumerate(lines)]
    return lines


def checkpoint(directory: Path, dtype: str) -> Path:
    """A model whose keys and values of eight sequences of 94 tokens do not fit into 1 MiB."""
    more = {"num_hidden_layers": 6, "num_key_value_heads": 4, "torch_dtype": dtype}
    config = tiny_llama_config() | more
    write_checkpoint(directory, config, random_weights(llama_shapes(config)))
    return directory


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("quantization", [None, "int8", "gguf"])
def test_drafts_of_a_copy_change_no_answer(tmp_path: Path, quantization: str | None, temperature: float) -> None:
    path = tmp_path / "m.gguf"
    if quantization == "gguf":
        write_gguf(path, quantization=Type.Q8_0, tokenizer="gpt2")
    else:
        path = checkpoint(tmp_path, "bfloat16")
    plain = built(path, {"policy": "off"}, quantization=quantization).engine
    wanted = answers(plain, temperature)
    assert plain.stats().num_preemptions > 0 or quantization == "gguf", "the pool is meant to be too small"
    for asked in (COPY, {"bits": 4}):
        drafting = {"policy": "fixed", "num_speculative_tokens": 3} | asked
        engine = built(path, drafting, quantization=quantization).engine
        assert answers(engine, temperature) == wanted
        speculation = engine.stats().speculation
        assert speculation is not None
        assert sum(each.accepted for each in speculation.methods if each.method == "self_quantized") > 0


def test_a_copy_shares_the_cache_and_its_weights_are_counted(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "float32")
    alone, with_copy = built(path, {}), built(path, COPY)
    assert alone.draft_runner is None, "auto makes no copy unless asked for one"
    assert with_copy.draft_runner is not None
    assert with_copy.draft_runner.cache is with_copy.runner.cache
    assert with_copy.info.kv_cache_bytes == alone.info.kv_cache_bytes
    assert 1.1 < with_copy.info.weight_bytes / alone.info.weight_bytes < 1.4


@pytest.mark.parametrize(
    "settings, problem",
    [
        ({"backend": "torch"}, "the torch backend has no fast products with 4-bit weights"),
        ({"quantization": "int4"}, "--quantization is int4, so the model itself is as fast"),
    ],
)
@pytest.mark.parametrize("asked", [COPY, {"bits": 4}])
def test_a_copy_that_would_not_be_faster_is_refused(
    tmp_path: Path, settings: dict[str, Any], problem: str, asked: dict[str, Any]
) -> None:
    path = checkpoint(tmp_path, "bfloat16")
    with pytest.raises(ConfigError, match=f"asks for drafts of a 4-bit copy of the model; {problem}"):
        built(path, asked, **settings)


def test_a_file_of_four_bits_is_not_copied(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, quantization=Type.Q4_0, tokenizer="gpt2")
    with pytest.raises(ConfigError, match=r"a copy takes .*, the model .*; one of more than 75% of the model"):
        built(path, COPY, quantization="gguf")
