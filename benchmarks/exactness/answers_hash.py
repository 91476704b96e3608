"""Hashes the answers to real prompts, to show that a change moved no token and no bit of a log probability.

    python -m benchmarks exactness.answers_hash QUESTIONS.jsonl OUT.json [--model FILE]
        [--prompts 240] [--tokens 48] [--concurrency 16] [--options '{"block_size": 32}']

Every prompt is asked four times: greedily, drawn at temperature 1 with a seed, with penalties and a bias, and with
log probabilities. It uses the public `faser.LLM` only.
"""

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.prompts import load_prompts
from benchmarks.runner import command_line, write_json
from faser import LLM, SamplingParams
from faser.kernels.cpu.build import chosen_isa


def kinds(tokens: int, seed: int) -> dict[str, SamplingParams]:
    """Sampling parameters by the name under which their answers are hashed."""
    return {
        "greedy": SamplingParams(temperature=0.0, max_tokens=tokens),
        "seeded": SamplingParams(temperature=1.0, seed=seed, max_tokens=tokens),
        "penalties": SamplingParams(
            temperature=0.8,
            top_p=0.95,
            top_k=50,
            seed=seed,
            presence_penalty=0.5,
            frequency_penalty=0.3,
            repetition_penalty=1.1,
            logit_bias={11: 2.0, 28: -3.0},
            max_tokens=tokens,
        ),
        "logprobs": SamplingParams(temperature=0.7, min_p=0.02, seed=seed, logprobs=3, max_tokens=tokens),
    }


def digest(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("questions", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default=None, help="directory or GGUF file; default: the model of `faser pull`")
    parser.add_argument("--prompts", type=int, default=240)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--dtype", default="float32,bfloat16", help="comma-separated")
    parser.add_argument("--speculative-config", default=None, help="JSON; the default is FASER's own")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--options", type=json.loads, default={}, help="JSON of LLM's other options, by name")
    options = parser.parse_args()
    config = json.loads(options.speculative_config) if options.speculative_config else None
    prompts = load_prompts(options.questions)
    step = max(1, len(prompts) // options.prompts)
    texts = [prompt.text for prompt in prompts[::step]][: options.prompts]
    result: dict[str, Any] = {
        "prompts": len(texts),
        "tokens": options.tokens,
        "model": options.model,
        "speculative_config": config,
        "options": options.options,
        "concurrency": options.concurrency,
        "kernels": chosen_isa(),
        "dtypes": {},
    }
    for dtype in options.dtype.split(","):
        began_s = time.perf_counter()
        parts: dict[str, list[str]] = {}
        with LLM(
            options.model,
            dtype=dtype,
            max_num_seqs=options.concurrency,
            max_model_len=4096,
            speculative_config=config,
            **options.options,
        ) as model:
            for start in range(0, len(texts), 40):
                asked = [
                    (text, name, sampling)
                    for number, text in enumerate(texts[start : start + 40], start)
                    for name, sampling in kinds(options.tokens, number).items()
                ]
                answers = model.chat(
                    [[{"role": "user", "content": text}] for text, _, _ in asked],
                    [sampling for _, _, sampling in asked],
                    use_tqdm=True,
                )
                for (_, name, _), answer in zip(asked, answers, strict=True):
                    sample = answer.outputs[0]
                    parts.setdefault(name, []).append(
                        repr((sample.token_ids, sample.logprobs, str(sample.finish_reason)))
                    )
        result["dtypes"][dtype] = {name: digest(each) for name, each in parts.items()}
        result["dtypes"][dtype]["seconds"] = round(time.perf_counter() - began_s, 1)
        print(dtype, json.dumps(result["dtypes"][dtype]), flush=True)
    write_json(options.out, result)
