"""A target and a draft model: what fits together, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from faser.config.engine import EngineConfig
from faser.engine.build import build_engine
from faser.engine.execution.drafting.blocks.loop import BlockRunner
from faser.engine.execution.overlap.lanes import DeviceLanes
from faser.engine.execution.runner.graph_runner import GraphRunner
from faser.engine.execution.startup.files import draft_model_files, find_models, target_files
from faser.engine.execution.startup.memory import kv_shapes
from faser.engine.execution.startup.models import (
    EngineHead,
    LoadedHead,
    LoadedModel,
    expected_graph_bytes,
    load_model,
    load_models,
    start_models,
)
from faser.errors import ConfigError
from faser.kernels.torch_backend import TorchBackend
from tests.checkpoints import VOCAB_SIZE, llama_shapes, random_weights, tiny_llama_config, write_checkpoint
from tests.engine.checkpoints.low_bit_checkpoints import KINDS, write_pair
from tests.engine.execution.drafting.seeded_blocks import BlockShape, write_block
from tests.engine.execution.drafting.seeded_heads import head_layers, head_spec, write_seeded
from tests.engine.execution.runner.test_graph_runner import write_heads_of_64
from tests.kernels.cuda.fake_graph import fake_backend


def checkpoint(directory: Path, **changes: object) -> Path:
    values = tiny_llama_config() | changes
    write_checkpoint(directory, values, random_weights(llama_shapes(values)))
    return directory


def config(**draft: object) -> EngineConfig:
    return EngineConfig(
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_model_len=512,
        speculative_config={"method": "draft_model", "model": "named/elsewhere"} | draft,
    )


def load_both(target: Path, draft: Path, options: EngineConfig) -> tuple[LoadedModel, LoadedModel, list[str]]:
    stages: list[str] = []
    backend = TorchBackend()

    def report(stage: str, _done: int, _total: int) -> None:
        stages.append(stage)

    files = target_files(options, target)
    loaded = load_model(options, files, backend, report)
    return loaded, load_model(options, draft_model_files(options, draft, files), backend, report), stages


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_draft_model_is_rounded_as_the_target_is(
    tiny_checkpoint: Path, tmp_path: Path, quantization: str
) -> None:
    small = checkpoint(tmp_path, num_hidden_layers=1)
    plain = load_both(tiny_checkpoint, small, config())
    for found, wide in zip(
        load_both(tiny_checkpoint, small, replace(config(), quantization=quantization))[:2], plain[:2], strict=True
    ):
        assert found.decoder.weight_bytes < wide.decoder.weight_bytes / 2


def test_a_draft_model_that_is_stored_quantised_stays_as_it_is(tiny_checkpoint: Path, tmp_path: Path) -> None:
    stored, _ = write_pair(tmp_path, KINDS["awq"])
    _, draft, _ = load_both(tiny_checkpoint, stored, replace(config(), quantization="int8"))
    assert draft.decoder.weight_bytes == load_both(tiny_checkpoint, stored, config())[1].decoder.weight_bytes


def test_a_draft_model_is_loaded_and_reports_progress(tiny_checkpoint: Path, tmp_path: Path) -> None:
    small = checkpoint(tmp_path, num_hidden_layers=1, hidden_size=32, torch_dtype="bfloat16")
    target, draft, stages = load_both(tiny_checkpoint, small, config())
    assert dict.fromkeys(stages) == dict.fromkeys(["loading weights", "loading draft model"])
    assert (target.decoder.spec.num_layers, draft.decoder.spec.num_layers) == (2, 1)
    assert (target.decoder.dtype, draft.decoder.dtype) == (torch.float32, torch.bfloat16)


def configuration(directory: Path, **changes: object) -> Path:
    """A checkpoint with its configuration and no weights."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(tiny_llama_config() | changes))
    (directory / "model.safetensors").touch()
    return directory


@pytest.mark.parametrize(
    "options, problem",
    [
        (
            {"kv_cache_memory": 1 << 20},
            "--kv-cache-memory is 1MiB; one context of 4096 tokens needs 2MiB; raise it, or lower --max-model-len",
        ),
        ({"max_model_len": 5000}, "--max-model-len is 5000; this model has at most 4096 positions"),
        ({"speculative_config": {"model": "OTHER"}}, "has 528 tokens and the target 512; a draft model needs"),
        (
            {"speculative_config": {"model": "/no/such/draft"}},
            "'/no/such/draft' is neither a local path nor a hub id",
        ),
    ],
)
def test_what_configurations_show_is_refused_before_kernels_are_compiled_and_weights_read(
    tmp_path: Path, options: dict[str, Any], problem: str
) -> None:
    target = configuration(tmp_path / "target", max_position_embeddings=4096)
    other = configuration(tmp_path / "other", vocab_size=528)
    if options.get("speculative_config", {}).get("model") == "OTHER":
        options = {"speculative_config": {"model": str(other)}}
    stages: list[str] = []
    with pytest.raises(ConfigError) as caught:
        build_engine(EngineConfig(**options), target, lambda stage, _done, _total: stages.append(stage))
    assert problem in str(caught.value)
    assert stages == []


def test_another_vocabulary_is_refused_with_both_sizes(tiny_checkpoint: Path, tmp_path: Path) -> None:
    other = checkpoint(tmp_path, vocab_size=528)
    with pytest.raises(ConfigError, match=rf"{tmp_path} has 528 tokens and the target 512"):
        load_both(tiny_checkpoint, other, config())


@pytest.mark.parametrize(
    "own, asked, expected", [(2048, None, 512), (100, None, 100), (2048, 300, 300), (100, 300, 100)]
)
def test_a_draft_model_drafts_as_far_as_its_context_goes(
    tiny_checkpoint: Path, tmp_path: Path, own: int, asked: int | None, expected: int
) -> None:
    short = checkpoint(tmp_path, max_position_embeddings=own)
    limit = {} if asked is None else {"max_model_len": asked}
    _, draft, _ = load_both(tiny_checkpoint, short, config(**limit))
    assert draft.files.max_positions == expected


@pytest.mark.parametrize("method", ["eagle3", "dspark"])
@pytest.mark.full(but=("dspark",))
def test_what_drafts_on_a_gpu_has_graphs_within_the_memory_that_is_left_for_them(
    tmp_path: Path, method: str
) -> None:
    path, drafting = write_heads_of_64(tmp_path / "target"), tmp_path / "drafting"
    layers: dict[str, Any] = {"hidden_size": 128, "num_heads": 2, "num_kv_heads": 1, "head_dim": 64}
    if method == "eagle3":
        write_seeded(drafting, head_spec(head_layers(**layers), target_hidden_size=128), dtype=torch.bfloat16)
    else:
        shape = BlockShape(vocab_size=VOCAB_SIZE, state_layers=(1, 2), **layers)
        of_target = load_file(path / "model.safetensors")
        write_block(drafting, shape, "dspark", target=of_target)
    options = EngineConfig(
        device="cuda:0",
        backend="flashinfer",
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        kv_cache_memory=1 << 20,
        speculative_config={"method": method, "model": str(drafting), "num_speculative_tokens": 3},
    )
    stages: dict[str, tuple[int, int]] = {}

    def report(stage: str, done: int, total: int) -> None:
        stages[stage] = (done, total)

    options, files = find_models(options, path, report)
    backend = fake_backend()
    target, (head,) = load_models(options, files, backend, report)
    assert isinstance(head, LoadedHead)
    shapes = kv_shapes(options, files, 64)
    start_models(options, target, [], shapes[:1], report, on=DeviceLanes())
    of_target_bytes = backend.graph_capture.graph_bytes
    _, (started,) = start_models(options, target, [head], shapes, report, on=DeviceLanes())
    assert isinstance(started, EngineHead)
    if isinstance(started.runner, BlockRunner):
        assert started.runner.graphs is not None
    else:
        assert isinstance(started.runner, GraphRunner)
    done, total = stages["capturing CUDA graphs of the head"]
    assert done == total > 0
    own_bytes = backend.graph_capture.graph_bytes - 2 * of_target_bytes
    assert 0 < own_bytes <= expected_graph_bytes(options, head)
    eager = replace(options, enforce_eager=True)
    assert expected_graph_bytes(eager, head) == 0
