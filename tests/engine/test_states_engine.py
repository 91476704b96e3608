"""Engines over a model with recurrent states: samples, aborts, early pruning, a measured start, what is refused.

Oracle: an engine that serves one sequence at a time and never drafts. test_families_engine.py compares crowded
engines with drafts in the same way.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from faser.config.engine import EngineConfig
from faser.distill.target import load_target
from faser.engine.build import build as build_from_config
from faser.engine.engine import Engine
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.models.shard import Shard
from faser.errors import ConfigError
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.forward import SeparateBlocks, SeparateLayers
from faser.kernels.interface.mixers import MixerShape
from faser.kernels.torch_backend import TorchBackend
from faser.types.request import Request
from tests.checkpoints import VOCAB_SIZE, write_tiny_checkpoint, write_tokenizer
from tests.engine.checkpoints.family_models import write_family_model
from tests.engine.execution.models.paged import load, prompt
from tests.engine.losslessness.equality import FEATURES, Answer, answers, build, build_with_parts, requests

NUM_TOKENS = 40
FIELDS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_family_model(directory, "qwen3_5_text", FIELDS)
    write_tokenizer(directory)
    return directory


def engine_of(model: Path, speculation: dict[str, Any] | None, **settings: Any) -> Engine:
    usual = {"max_model_len": 224, "kv_cache_memory": 4 << 20, "max_num_seqs": 5, "max_num_batched_tokens": 40}
    return build((model, model), speculation, **usual | settings)


def asked(max_tokens: int = NUM_TOKENS) -> list[Request]:
    """Three greedy ones, which repeat themselves, so that drafts are right; two that sample."""
    greedy, sampled = (requests(temperature=each, max_tokens=max_tokens, n=2) for each in (0.0, 0.8))
    return [*greedy[:3], *sampled[3:5]]


@pytest.fixture(scope="module")
def wanted(model: Path) -> dict[tuple[str, int], Answer]:
    alone = engine_of(model, None, max_num_seqs=1)
    return {key: found for each in asked() for key, found in answers(alone, [each]).items()}


def predicted(request: Request, wanted: Mapping[tuple[str, int], Answer]) -> Request:
    """To be drafted from its first sample's answer, in which every ninth token is wrong."""
    answer = wanted[request.request_id, 0][0]
    guess = [token_id if at % 9 else (token_id + 1) % VOCAB_SIZE for at, token_id in enumerate(answer, 1)]
    return replace(request, predicted_token_ids=tuple(guess))


@pytest.mark.parametrize("early_prune", ["off", "on"])
def test_samples_of_a_request_are_those_it_has_alone(
    early_prune: str, model: Path, wanted: dict[tuple[str, int], Answer]
) -> None:
    """With drafts, and with drafts that leave their forward between two layers."""
    engine = engine_of(model, {"method": "suffix"}, early_prune=early_prune)
    engine.use_policy("fixed", 4)
    assert answers(engine, [predicted(each, wanted) for each in asked()]) == wanted
    stats = engine.stats().speculation
    assert stats is not None
    assert 0 < sum(each.accepted for each in stats.methods) < sum(each.verified for each in stats.methods)
    assert engine.stats().prefix_cache_hits > 0


@pytest.mark.parametrize(
    "method, feature", [("grammar", "schema"), ("auto", "schema"), ("auto", "structure and all others")]
)
@pytest.mark.full(but=("auto-structure and all others",))
def test_structured_answers_are_those_without_drafts(method: str, feature: str, model: Path) -> None:
    """Greedy and sampled, from prompts that repeat themselves; many drafts are what the structure dictates."""
    sampling = FEATURES[feature] | {"max_tokens": 60, "n": 1}
    asked = [*requests(**sampling | {"temperature": 0.0})[:4], *requests(**sampling)[4:8]]
    alone = engine_of(model, None, max_num_seqs=1)
    wanted = {key: found for each in asked for key, found in answers(alone, [each]).items()}
    engine = engine_of(model, {"method": method})
    engine.use_policy("fixed", 4)
    assert answers(engine, asked) == wanted
    stats = engine.stats().speculation
    assert stats is not None
    methods = {each.method: each for each in stats.methods}
    assert methods["grammar"].accepted > 0
    if feature != "schema":  # of which drafts from text are wrong
        assert sum(each.accepted for each in stats.methods) < sum(each.verified for each in stats.methods)


def test_a_slot_that_was_left_in_the_middle_serves_the_next_request(
    model: Path, wanted: dict[tuple[str, int], Answer]
) -> None:
    engine = engine_of(model, {"method": "suffix"}, max_num_seqs=2)
    for each in asked(max_tokens=60):
        engine.add(each)
        for _ in range(7):
            engine.step()
        engine.abort(each.request_id)
    assert answers(engine, asked()) == wanted


def test_a_start_that_measures_its_steps_leaves_no_state_behind(
    model: Path, wanted: dict[tuple[str, int], Answer]
) -> None:
    """The default start, whose dummy steps use all slots."""
    config = EngineConfig(
        model=str(model), dtype="float32", max_model_len=224, max_num_seqs=5, max_num_batched_tokens=40
    )
    engine = build_from_config(config, model, lambda *_: None).engine
    assert answers(engine, asked()) == wanted


def test_layers_in_one_call_give_the_bits_of_single_operations(
    model: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids = prompt(90, VOCAB_SIZE)
    native = NativeBackend(library_path(cache_dir=kernel_cache), num_threads=2)
    found = load(model, backend=native, dtype=torch.bfloat16).prefill(token_ids, (1, 33, 20))
    monkeypatch.setattr(native, "layers", SeparateLayers(native, SeparateBlocks(native)))
    separate = load(model, backend=native, dtype=torch.bfloat16).prefill(token_ids, (40, 1, 1))
    assert torch.equal(found, separate)


def test_memory_counts_the_states_of_all_sequences(model: Path) -> None:
    def of(max_num_seqs: int) -> int:
        built = build_with_parts(
            (model, model),
            None,
            max_model_len=64,
            max_num_seqs=max_num_seqs,
            kv_cache_memory=3 << 20,
            state_snapshot_memory=0,
        )
        return built.info.num_blocks

    block_bytes = 16 * 2 * 2 * 32 * 4  # of the one layer that attends
    state = 4 * (4 * 16 * 32 + 16 * (2 * 16 + 4 * 32 + 2 * 4)) + 4 * 4 * (2 * 2 * 16 + 4 * 32)
    assert of(1) == ((3 << 20) - 3 * state) // block_bytes
    assert of(4) == ((3 << 20) - 12 * state) // block_bytes
    with pytest.raises(ConfigError, match="states of 64 sequences"):
        of(64)


class WithoutMixers(TorchBackend):
    def mixes(self, _shape: MixerShape) -> bool:
        return False


def test_what_cannot_have_states_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    def load_on(backend: Backend, shard: Shard | None = None) -> None:
        load_decoder(
            model, backend, torch.float32, max_model_len=64, max_rows=8, progress=lambda *_: None, shard=shard
        )

    with pytest.raises(ConfigError, match="has gated delta nets; the torch backend computes none"):
        load_on(WithoutMixers())
    with pytest.raises(ConfigError, match="which ranks cannot share; tensor_parallel_size is 2"):
        load_on(TorchBackend(), Shard(rank=0, size=2))
    with pytest.raises(ConfigError, match="has gated delta nets; heads are distilled from models without"):
        load_target(EngineConfig(model=str(model)), model, lambda *_: None)
    write_tiny_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"draft model .* has gated delta nets"):
        build((tmp_path, model), {"method": "draft_model", "model": str(model)})
    odd = tmp_path / "odd"
    write_family_model(odd, "qwen3_5_text", FIELDS | {"linear_value_head_dim": 24})
    with pytest.raises(ConfigError, match="linear_value_head_dim that is a multiple of 16, not 24"):
        engine_of(odd, None)
