"""The embedded default answers exactly as transformers does: greedy, float32. 4 prompts; all forty with --full.

Oracle: one transformers forward over prompt and answer. If every answered token is the arg-max of the logits
before it, then greedy decoding from the prompt is that answer, by induction over its tokens.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.exactness.greedy_equality import load_oracle
from faser.engine.checkpoints.source import resolve
from faser.offline import LLM
from faser.outputs import RequestOutput
from faser.types.sampling import SamplingParams
from tests.prompts import PROMPTS

pytestmark = pytest.mark.slow

EXACT: dict[str, Any] = {"dtype": "float32", "quantization": "none"}
CHUNK = 16  # rows a step: less than most prompts have, so that they are computed in pieces


@pytest.fixture(scope="module")
def directory(user_cache: Path) -> Path:
    """Where the user has it, too: it is downloaded once, not by every run."""
    return resolve(None, user_cache, progress=lambda _stage, _done, _total: None)


@pytest.fixture(scope="module")
def prompts(full: bool) -> tuple[str, ...]:
    """All forty take minutes."""
    return PROMPTS if full else PROMPTS[4:8]


@pytest.fixture(scope="module")
def greedy(full: bool) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=128 if full else 16, ignore_eos=True)


@pytest.fixture(scope="module")
def alone(directory: Path, prompts: tuple[str, ...], greedy: SamplingParams) -> list[RequestOutput]:
    with LLM(str(directory), **EXACT, max_num_seqs=1, max_num_batched_tokens=CHUNK) as model:
        return [model.generate(prompt, greedy)[0] for prompt in prompts]


@pytest.fixture(scope="module")
def oracle(directory: Path) -> torch.nn.Module:
    return load_oracle(directory)


def oracle_tokens(model: torch.nn.Module, generation: RequestOutput) -> list[int]:
    """What transformers would choose at every position of the answer."""
    prompt, answer = generation.prompt_token_ids, generation.outputs[0].token_ids
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0]
    chosen: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return chosen


@pytest.mark.full
def test_one_at_a_time_every_token_is_the_oracles(
    prompts: tuple[str, ...], alone: list[RequestOutput], oracle: torch.nn.Module
) -> None:
    for prompt, generation in zip(prompts, alone, strict=True):
        assert generation.outputs[0].token_ids == oracle_tokens(oracle, generation), prompt


def test_sixteen_at_once_chunked_and_cached_the_tokens_are_the_same(
    directory: Path, prompts: tuple[str, ...], greedy: SamplingParams, alone: list[RequestOutput]
) -> None:
    with LLM(str(directory), **EXACT, max_num_seqs=16, max_num_batched_tokens=CHUNK) as model:
        crowd = model.generate(prompts, greedy)
        cached = model.generate(prompts, greedy)
    for prompt, lone, together, again in zip(prompts, alone, crowd, cached, strict=True):
        assert together.outputs[0].token_ids == lone.outputs[0].token_ids, prompt
        assert again.outputs[0].token_ids == lone.outputs[0].token_ids, prompt
    assert any(generation.num_cached_tokens for generation in cached)


@pytest.mark.parametrize("quantization", [None, pytest.param("none", marks=pytest.mark.full)])
@pytest.mark.full
def test_bfloat16_is_the_same_alone_and_in_a_crowd(
    directory: Path, quantization: str | None, prompts: tuple[str, ...]
) -> None:
    """The native products give a row the same bits whatever else is in the step, from either form of weights."""
    sampling = SamplingParams(temperature=1.0, seed=11, max_tokens=32, ignore_eos=True)
    with LLM(
        str(directory), dtype="bfloat16", quantization=quantization, max_num_seqs=16, backend="native"
    ) as model:
        lone = [model.generate(prompt, sampling)[0].outputs[0].token_ids for prompt in prompts[:4]]
        crowd = [each.outputs[0].token_ids for each in model.generate([*prompts, *PROMPTS[-8:]], sampling)]
    assert crowd[:4] == lone
