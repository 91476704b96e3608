"""Speculation changes no token: forty prompts, sixteen at once, on against off, over every drafter and policy.

Oracle: the same engine without a drafter. Float32 on the native kernels, where a row has the same bits whatever
its neighbours; a KV pool that is too small for all, so that sequences are preempted; prefix caching on.
Planted bugs it was seen to catch are listed with the tests of the parts.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from faser.config import EngineConfig
from faser.engine.build import build_engine
from faser.engine.cost_model import CostModel
from faser.engine.engine import Engine
from faser.engine.plan import SequenceDelta
from faser.speculation import POLICIES, SpeculationParams
from faser.types import PositionLogprobs, Request, SamplingParams
from tests.checkpoints import tiny_tokenizer, write_tiny_checkpoint
from tests.prompts import PROMPTS

CAP = 5
NUM_TOKENS = 90
DRAFTERS: dict[str, dict[str, Any]] = {
    "auto": {},
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "layer_skip": {"method": "layer_skip"},
    "draft_model": {"method": "draft_model"},
    "chooser": {"method": "auto"},
    "coupled draft_model": {"method": "draft_model", "draft_sample_method": "coupled"},
    "sampled draft_model": {"method": "draft_model", "draft_sample_method": "probabilistic"},
}
WITH_MODEL = ("draft_model", "chooser", "coupled draft_model", "sampled draft_model")

Answer = tuple[tuple[int, ...], tuple[PositionLogprobs, ...]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a drafter that is the target with noise on its weights."""
    target = write_tiny_checkpoint(tmp_path_factory.mktemp("target"))
    drafter = write_tiny_checkpoint(tmp_path_factory.mktemp("drafter"))
    generator = torch.Generator().manual_seed(5)
    weights = load_file(drafter / "model.safetensors")
    noisy = {
        name: weight + 0.05 * weight.std(correction=0) * torch.randn(weight.shape, generator=generator)
        for name, weight in weights.items()
    }
    save_file(noisy, drafter / "model.safetensors")
    return target, drafter


def build(checkpoints: tuple[Path, Path], speculation: dict[str, Any] | None) -> Engine:
    target, _ = checkpoints
    table = {"num_speculative_tokens": CAP, "num_speculative_tokens_per_batch_size": [[1, 4, CAP], [5, 16, 2]]}
    given = {"policy": "off"} if speculation is None else table | speculation
    config = EngineConfig(
        model=str(target),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=96,
        kv_cache_memory=1 << 20,
        speculative_config=given,
    )
    costs = CostModel.proportional(step_s=0.01, pass_s=1e-5, text_s=1e-7)  # drafting seems to pay
    engine, _ = build_engine(config, target, lambda _stage, _done, _total: None, costs=costs)
    return engine


def requests(**sampling: Any) -> list[Request]:
    """Every fourth prompt begins as the one before, so that blocks are shared; some repeat themselves."""
    tokenizer = tiny_tokenizer()
    texts = [text * 3 if i % 3 == 0 else text for i, text in enumerate(PROMPTS)]
    texts = [texts[i - 1] + text if i % 4 == 3 else text for i, text in enumerate(texts)]
    return [
        Request(
            request_id=str(i),
            prompt_token_ids=tuple(tokenizer.encode(text).ids[:150]),
            sampling=SamplingParams(
                **{"max_tokens": NUM_TOKENS - i % 7, "seed": i, "ignore_eos": True} | sampling
            ),
            arrival_s=float(i),
            speculation=SpeculationParams(enabled=i % 11 != 10, max_tokens=3 if i % 5 == 4 else None),
        )
        for i, text in enumerate(texts)
    ]


def answers(engine: Engine, asked: list[Request]) -> dict[tuple[str, int], Answer]:
    for request in asked:
        engine.add(request)
    said: dict[tuple[str, int], list[SequenceDelta]] = {}
    while engine.has_work():
        for delta in engine.step():
            assert delta.error is None, delta.error
            said.setdefault((delta.request_id, delta.index), []).append(delta)
    return {
        key: (
            tuple(token_id for delta in deltas for token_id in delta.token_ids),
            tuple(position for delta in deltas for position in delta.logprobs or ()),
        )
        for key, deltas in said.items()
    }


@pytest.fixture(scope="module")
def greedy_answers(checkpoints: tuple[Path, Path]) -> dict[tuple[str, int], Answer]:
    engine = build(checkpoints, None)
    found = answers(engine, requests(temperature=0.0))
    assert engine.stats().num_preemptions > 0, "the pool is meant to be too small"
    return found


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "truncated": {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "min_p": 0.02},
    "penalties": {
        "temperature": 0.7,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "logit_bias": ((40, 2.0), (41, -3.0)),
    },
    "endings": {
        "temperature": 0.0,
        "ignore_eos": False,
        "min_tokens": 9,
        "stop_token_ids": tuple(range(3, 90)),
        "logprobs": 2,
        "n": 2,
    },
    "scores": {
        "temperature": 0.6,
        "logprobs": 3,
        "prompt_logprobs": 1,
        "allowed_token_ids": tuple(range(20, 400)),
    },
}


@pytest.fixture(scope="module", params=DRAFTERS)
def drafting(request: pytest.FixtureRequest, checkpoints: tuple[Path, Path]) -> tuple[str, Engine]:
    name = str(request.param)
    given = dict(DRAFTERS[name])
    if name in WITH_MODEL:
        given["model"] = str(checkpoints[1])
    return name, build(checkpoints, given)


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_tokens_are_those_without_speculation(
    drafting: tuple[str, Engine], policy: str, greedy_answers: dict[tuple[str, int], Answer]
) -> None:
    name, engine = drafting
    engine.use_policy(policy, 3 if policy == "fixed" else None)
    before = engine.stats().speculation
    found = answers(engine, requests(temperature=0.0))
    assert found == greedy_answers
    after = engine.stats().speculation
    assert before is not None
    assert after is not None
    drafts = after.num_drafts - before.num_drafts
    assert drafts == 0 or policy != "off"
    if policy in ("fixed", "table", "survival"):  # goodput and faser may find that drafting does not pay
        assert drafts > 0, f"{name} under {policy} sent no draft"
    assert engine.stats().kv_usage == 0.0


@pytest.mark.parametrize("draft_sample_method", ["greedy", "coupled"])
@pytest.mark.parametrize("feature", FEATURES)
def test_sampled_tokens_and_scores_are_those_without_speculation(
    checkpoints: tuple[Path, Path], feature: str, draft_sample_method: str
) -> None:
    """Point-mass drafts: the very same tokens, since every row has the noise it would have had alone."""
    asked = requests(**FEATURES[feature])
    expected = answers(build(checkpoints, None), asked)
    engine = build(
        checkpoints, {"method": "auto", "model": str(checkpoints[1]), "draft_sample_method": draft_sample_method}
    )
    engine.use_policy("fixed", CAP)
    found = answers(engine, asked)
    assert found == expected
    speculated = engine.stats().speculation
    assert speculated is not None
    assert sum(each.accepted for each in speculated.methods) > 0
