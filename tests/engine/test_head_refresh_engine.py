"""Engines that adopt a refreshed head while they serve.

Oracle: the engine without speculation, token for token. Two heads: the first is random, so that its drafts are
refused; the refreshed one knows the model, so that its drafts are accepted. So the accepted tokens say which of
them drafts.

Planted bugs that these tests have caught: a sequence with a salt is drafted for by the refreshed head; a running
sequence gets the refreshed head.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from faser.config.engine import EngineConfig
from faser.distill.speculators_writer import write_speculators
from faser.engine.build import build
from faser.engine.checkpoints.heads import FeatureNorm, HeadSpec
from faser.engine.engine import Engine
from faser.errors import ConfigError, ModelError
from faser.types import Request, SamplingParams
from tests.engine.execution.drafting.seeded_heads import head_layers, head_spec, seeded_weights
from tests.engine.test_head_engine import STATE_LAYERS, STEP_TIMES, WIDTH, accepted, write_agreeing


def first_spec(**changes: Any) -> HeadSpec:
    """Of the form that can be trained, for the model of write_agreeing."""
    layers = head_layers(vocab_size=WIDTH, hidden_size=WIDTH, size=WIDTH, num_kv_heads=4, head_dim=32)
    found: dict[str, Any] = {
        "decoder": layers,
        "draft_vocab_size": WIDTH,
        "target_hidden_size": WIDTH,
        "state_layers": STATE_LAYERS,
        "feature_norm": FeatureNorm.EACH,
        "norm_before_residual": True,
    }
    return head_spec(**found | changes)


def write_random(directory: Path, spec: HeadSpec) -> Path:
    weights = seeded_weights(spec)
    del weights["embed_tokens.weight"]
    weights.pop("fc.bias", None)
    write_speculators(
        directory, spec, weights, draft_ids=None, target_architectures=["LlamaForCausalLM"], dtype=torch.float32
    )
    return directory


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The model, the first head, and the refreshed one."""
    folder = tmp_path_factory.mktemp("refresh")
    model, refreshed = write_agreeing(folder, torch.float32)
    return model, write_random(folder / "first", first_spec()), refreshed


def started(folders: tuple[Path, Path, Path], **settings: Any) -> Engine:
    """An engine that drafts three tokens with the first head."""
    model, first, _ = folders
    drafting = {"policy": "fixed", "num_speculative_tokens": 3, "method": "eagle3", "model": str(first)}
    chosen: dict[str, Any] = {
        "backend": "native",
        "device": "cpu",
        "num_threads": 1,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "kv_cache_memory": 16 << 20,
        "speculative_config": drafting,
    }
    config = EngineConfig(**chosen | settings)
    refreshes = config.speculation.policy != "off"
    return build(config, model, lambda *_: None, step_times=STEP_TIMES, refreshes_head=refreshes).engine


def request(name: str, *, tokens: int = 40, temperature: float = 0.0, salt: str | None = None) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(range(3, 20 + len(name))),
        sampling=SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=len(name)),
        cache_salt=salt,
    )


def test_a_sequence_that_starts_afterwards_is_drafted_for_by_the_refreshed_head(
    folders: tuple[Path, Path, Path],
) -> None:
    engine = started(folders)
    engine.add(request("a"))
    while engine.has_work():
        engine.step()
    before = accepted(engine)
    assert before[1] < 0.2 * before[0]
    assert engine.adopt_head(folders[2])
    engine.add(request("b"))
    while engine.has_work():
        engine.step()
    verified, accepted_tokens = (after - old for after, old in zip(accepted(engine), before, strict=True))
    assert accepted_tokens >= verified - 6


def test_a_running_sequence_keeps_the_head_that_it_began_with(folders: tuple[Path, Path, Path]) -> None:
    engine = started(folders)
    engine.add(request("a", tokens=80))
    for _ in range(10):
        engine.step()
    before = accepted(engine)
    assert engine.adopt_head(folders[2])
    while engine.has_work():
        engine.step()
    verified, accepted_tokens = (after - old for after, old in zip(accepted(engine), before, strict=True))
    assert accepted_tokens < 0.2 * verified
    assert verified > 60


def test_a_sequence_with_a_salt_is_drafted_for_by_the_first_head(folders: tuple[Path, Path, Path]) -> None:
    engine = started(folders)
    assert engine.adopt_head(folders[2])
    engine.add(request("a", salt="mine"))
    while engine.has_work():
        engine.step()
    verified, accepted_tokens = accepted(engine)
    assert accepted_tokens < 0.2 * verified
    assert verified > 60


def answers(engine: Engine, temperature: float, swap: Path | None = None) -> dict[str, list[int]]:
    """Of sequences that start before, while and after heads are swapped; every third one has a salt."""
    waiting = [
        request("x" * (at + 1), tokens=50 + at, temperature=temperature, salt="mine" if at % 3 == 2 else None)
        for at in range(18)
    ]
    said: dict[str, list[int]] = {}
    steps = 0
    while waiting or engine.has_work():
        if waiting and steps % 3 == 0:
            engine.add(waiting.pop(0))
        if swap is not None and steps % 37 == 20:
            engine.adopt_head(swap)
        for delta in engine.step():
            assert delta.error is None, delta.error
            said.setdefault(delta.request_id, []).extend(delta.token_ids)
        steps += 1
    return said


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_no_answer_changes_before_across_and_after_a_swap(
    folders: tuple[Path, Path, Path], temperature: float
) -> None:
    small = {"kv_cache_memory": 2 << 20}
    plain = started(folders, speculative_config={"policy": "off"}, **small)
    engine = started(folders, **small)
    assert answers(engine, temperature, swap=folders[2]) == answers(plain, temperature)
    assert engine.stats().num_preemptions > 0, "the pool is meant to be too small"
    verified, accepted_tokens = accepted(engine)
    assert accepted_tokens > 0.1 * verified, "the refreshed head is meant to have drafted"


def test_what_cannot_be_refreshed_is_refused_by_name_and_reason(
    folders: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    model, _, untrainable = folders
    with pytest.raises(ConfigError, match=r"distill_online is true; the head in .* cannot be trained: its states"):
        started((model, untrainable, untrainable))
    config = EngineConfig(device="cpu", backend="torch", speculative_config={"method": "ngram"})
    with pytest.raises(ConfigError, match="distill_online is true; no head drafts for this model"):
        build(config, model, lambda *_: None, step_times=STEP_TIMES, refreshes_head=True)
    other = write_random(tmp_path / "other", first_spec(state_layers=(1, 3, 6)))
    engine = started(folders)
    with pytest.raises(ModelError, match=r"reads the states of the layers \(1, 3, 6\); this engine keeps"):
        engine.adopt_head(other)
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        engine.adopt_head(tmp_path / "nothing")
