"""Engines that compute with low-bit weights, on the native kernels: drafts change no answer.

Oracle: the engine without speculation, token for token.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from faser.config.engine import EngineConfig
from faser.engine.build import build_engine
from faser.engine.contract.step_times import StepTimes
from faser.engine.engine import Engine
from faser.types.request import Request
from faser.types.sampling import SamplingParams
from tests.checkpoints import write_tiny_checkpoint, write_tokenizer
from tests.engine.checkpoints.gguf.gguf_files import write_gguf
from tests.engine.checkpoints.low_bit_checkpoints import KINDS, write_pair

STEP_TIMES = StepTimes.proportional(step_s=1e-2, pass_s=1e-3)


def built(path: Path, speculation: dict[str, Any], quantization: str | None = "gguf") -> Engine:
    config = EngineConfig(
        backend="native",
        device="cpu",
        quantization=quantization,
        num_threads=2,
        max_model_len=96,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        kv_cache_memory=1 << 20,
        speculative_config=speculation,
    )
    engine, _ = build_engine(config, path, lambda *_: None, step_times=STEP_TIMES)
    return engine


def answers(engine: Engine, temperature: float) -> dict[str, list[int]]:
    said: dict[str, list[int]] = {}
    for i in range(4):
        engine.add(
            Request(
                request_id=str(i),
                prompt_token_ids=(*range(3, 25 + 3 * i), 30 + i),
                sampling=SamplingParams(temperature=temperature, max_tokens=30, ignore_eos=True, seed=i),
                arrival_s=0.0,
            )
        )
    while engine.has_work():
        for delta in engine.step():
            assert delta.error is None, delta.error
            said.setdefault(delta.request_id, []).extend(delta.token_ids)
    return said


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("quantization", [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0])
def test_drafts_change_no_answer(tmp_path: Path, quantization: Type, temperature: float) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, quantization=quantization, tokenizer="gpt2")
    wanted = answers(built(path, {"policy": "off"}), temperature)
    drafting = {"method": "draft_model", "model": str(path), "policy": "fixed", "num_speculative_tokens": 3}
    assert answers(built(path, drafting), temperature) == wanted
    assert {name: len(token_ids) for name, token_ids in wanted.items()} == dict.fromkeys("0123", 30)


def test_a_split_model_answers_as_the_whole_file_does(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", quantization=Type.Q8_0, tokenizer="gpt2")
    write_gguf(tmp_path / "p.gguf", quantization=Type.Q8_0, tokenizer="gpt2", tensors_a_part=8)
    whole, parts = (
        answers(built(tmp_path / name, {"policy": "off"}), 0.0) for name in ("m.gguf", "p-00002-of-00003.gguf")
    )
    assert parts == whole
    assert len(whole["0"]) == 30


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_drafts_change_no_answer_of_weights_rounded_while_loading(
    tmp_path: Path, quantization: str, temperature: float
) -> None:
    write_tiny_checkpoint(tmp_path, dtype=torch.bfloat16)
    wanted = answers(built(tmp_path, {"policy": "off"}, quantization), temperature)
    drafting = {"method": "draft_model", "model": str(tmp_path), "policy": "fixed", "num_speculative_tokens": 3}
    assert answers(built(tmp_path, drafting, quantization), temperature) == wanted
    assert {name: len(token_ids) for name, token_ids in wanted.items()} == dict.fromkeys("0123", 30)


@pytest.mark.parametrize("kind", ["awq", "gptq", "gptq-desc-act", "w4a16-asymmetric", "w8a8"])
def test_drafts_change_no_answer_of_a_quantised_checkpoint(tmp_path: Path, kind: str) -> None:
    path, _ = write_pair(tmp_path, KINDS[kind], dtype=torch.bfloat16)
    write_tokenizer(path)
    wanted = answers(built(path, {"policy": "off"}, None), 0.0)
    drafting = {"method": "draft_model", "model": str(path), "policy": "fixed", "num_speculative_tokens": 3}
    assert answers(built(path, drafting, None), 0.0) == wanted
    assert {name: len(token_ids) for name, token_ids in wanted.items()} == dict.fromkeys("0123", 30)
