"""One engine against another, token by token: small checkpoints, forty requests, and what they answer.

The pool is too small for all, so sequences are preempted; prefix caching is on; float32 on the native kernels,
where a row has the same bits whatever its neighbours.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.exactness.schemas import long_keys
from faser.config.engine import EngineConfig
from faser.engine.build import Built
from faser.engine.build import build as build_from_config
from faser.engine.contract.plan import SequenceDelta
from faser.engine.contract.step_times import StepTimes
from faser.engine.engine import Engine
from faser.engine.execution.overlap.partition import Partition
from faser.engine.execution.startup.executor import WrapDrafter
from faser.types.answer import PositionLogprobs
from faser.types.request import Request, SpeculationParams
from faser.types.sampling import SamplingParams, StructuredOutput, StructureKind, ThinkingBudget
from tests.checkpoints import tiny_tokenizer, write_tiny_checkpoint
from tests.prompts import PROMPTS

CAP = 5
NUM_TOKENS = 90

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
    "schema": {
        "temperature": 0.9,
        "structured_output": StructuredOutput(kind=StructureKind.JSON, text=json.dumps(long_keys())),
        "n": 2,
        "logprobs": 2,
    },
    "structure and all others": {
        "temperature": 0.7,
        "structured_output": StructuredOutput(
            kind=StructureKind.REGEX, text="([a-f ]{3,9}(the|fox|jumps)){2,9}[.!]"
        ),
        "repetition_penalty": 1.2,
        "logit_bias": ((40, 2.0), (41, -3.0)),
        "allowed_token_ids": tuple(range(3, 500)),
        "ignore_eos": False,
        "min_tokens": 9,
        "top_k": 30,
    },
    "thinking": {
        "temperature": 0.9,
        "thinking_budget": ThinkingBudget(max_tokens=13, begin=(40, 41), end=42, is_open=True, repeats=True),
        "logit_bias": ((40, 9.0), (41, 9.0), (42, 3.0)),  # several blocks, some of which the model ends
        "logprobs": 1,
    },
    "scores": {
        "temperature": 0.6,
        "logprobs": 3,
        "prompt_logprobs": 1,
        "allowed_token_ids": tuple(range(20, 400)),
        "bad_words": tuple((first, last) for first in range(20, 400) for last in range(20 + first % 9, 400, 9)),
    },
}

Answer = tuple[tuple[int, ...], tuple[PositionLogprobs, ...]]


def write_pair(target: Path, drafter: Path) -> tuple[Path, Path]:
    """A target, and a drafter that is the target with noise on its weights."""
    write_tiny_checkpoint(target)
    write_tiny_checkpoint(drafter)
    add_noise(drafter)
    return target, drafter


def add_noise(checkpoint: Path, *, size: float = 0.05) -> None:
    """size: of the noise, in standard deviations of each weight."""
    generator = torch.Generator().manual_seed(5)
    weights = load_file(checkpoint / "model.safetensors")
    noisy = {
        name: weight + size * weight.std(correction=0) * torch.randn(weight.shape, generator=generator)
        for name, weight in weights.items()
    }
    save_file(noisy, checkpoint / "model.safetensors", metadata={"format": "pt"})


def build(
    checkpoints: tuple[Path, Path],
    speculation: dict[str, Any] | None,
    *,
    partition: Partition | None = None,
    wrap_drafter: WrapDrafter = lambda drafter: drafter,
    **settings: Any,
) -> Engine:
    """speculation: as in speculative_config, in addition to a cap and a table; None: off."""
    return build_with_parts(
        checkpoints, speculation, partition=partition, wrap_drafter=wrap_drafter, **settings
    ).engine


def build_with_parts(
    checkpoints: tuple[Path, Path],
    speculation: dict[str, Any] | None,
    *,
    partition: Partition | None = None,
    wrap_drafter: WrapDrafter = lambda drafter: drafter,
    **settings: Any,
) -> Built:
    target, _ = checkpoints
    table = {"num_speculative_tokens": CAP, "num_speculative_tokens_per_batch_size": [[1, 4, CAP], [5, 16, 2]]}
    given = {"policy": "off"} if speculation is None else table | speculation
    usual: dict[str, Any] = {
        "dtype": "float32",
        "kv_cache_memory": 1 << 20,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 96,
    }
    config = EngineConfig(model=str(target), speculative_config=given, **usual | settings)
    times = StepTimes.proportional(step_s=0.01, pass_s=1e-5, text_s=1e-7)  # drafting seems to pay
    return build_from_config(
        config, target, _quiet, step_times=times, partition=partition, wrap_drafter=wrap_drafter
    )


def _quiet(_stage: str, _done: int, _total: int) -> None:
    pass


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
