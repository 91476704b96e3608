"""`vllm bench serve`: random prompts, Spec-Bench, and conversations in ShareGPT's form.

It reads /metrics before and after a run; from vllm:spec_decode_* comes its block about speculative decoding.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.generators.setup import VLLM_SOURCE
from benchmarks.generators.tool import (
    OFFLINE,
    Command,
    Drafts,
    Figures,
    Latency,
    Run,
    Target,
    latency_ms,
    write_hub_cache,
)

_LAUNCHER = Path(__file__).with_name("vllm_launcher.py")
_RESULT = "result.json"
_BLOCK = "Speculative Decoding"
_PERCENTILES = (50, 90, 99)
_NUM_REQUESTS = 16
_INPUT_TOKENS = 64
_OUTPUT_TOKENS = 48
_CHAT = ("--backend", "openai-chat", "--endpoint", "/v1/chat/completions")


def runs() -> tuple[Run, ...]:
    return (
        Run(name="random, completions", tool="vllm", distribution=None, command=_random, says=_BLOCK),
        Run(name="Spec-Bench, chat", tool="vllm", distribution=None, command=_spec_bench, says=_BLOCK),
        Run(name="ShareGPT's form, chat", tool="vllm", distribution=None, command=_share_gpt, says=_BLOCK),
        Run(name="Spec-Bench, responses", tool="vllm", distribution=None, command=_responses, says=_BLOCK),
    )


def _random(target: Target) -> Command:
    """With a request before the measurement that finds out whether the server is ready."""
    options = ["--dataset-name", "random", "--random-input-len", str(_INPUT_TOKENS)]
    options += ["--random-output-len", str(_OUTPUT_TOKENS), "--ignore-eos", "--ready-check-timeout-sec", "60"]
    options += ["--max-concurrency", "4", "--backend", "openai", "--endpoint", "/v1/completions"]
    return _command(target, options, with_ready_check=True, own_input_tokens=_NUM_REQUESTS * _INPUT_TOKENS)


def _spec_bench(target: Target) -> Command:
    """With arrivals at a rate, goodput, and a salt, so that a stream has one event a step."""
    options = ["--dataset-name", "spec_bench", "--dataset-path", str(target.questions)]
    options += ["--spec-bench-output-len", str(_OUTPUT_TOKENS), "--request-rate", "4"]
    options += ["--goodput", "ttft:1000", "tpot:100", "--extra-body", '{"cache_salt": "generators"}', *_CHAT]
    return _command(target, options)


def _share_gpt(target: Target) -> Command:
    """Without --model and --tokenizer: they come from /v1/models."""
    path = target.folder / "conversations.json"
    lines = [json.loads(line) for line in target.questions.read_text("utf-8").splitlines()]
    conversations = [
        [{"from": "human", "value": first}, {"from": "gpt", "value": second}]
        for first, second in (each["turns"] for each in lines if len(each["turns"]) == 2)
    ]
    path.write_text(json.dumps([{"conversations": each} for each in conversations]), encoding="utf-8")
    options = ["--dataset-name", "sharegpt", "--dataset-path", str(path)]
    options += ["--sharegpt-output-len", str(_OUTPUT_TOKENS), "--max-concurrency", "4", *_CHAT]
    if not Path(target.root).is_dir():
        write_hub_cache(target, target.root)
    return _command(target, options, names_model=False)


def _responses(target: Target) -> Command:
    options = ["--dataset-name", "spec_bench", "--dataset-path", str(target.questions)]
    options += ["--spec-bench-output-len", str(_OUTPUT_TOKENS), "--max-concurrency", "4"]
    options += ["--backend", "openai-responses", "--endpoint", "/v1/responses"]
    return _command(target, options)


def _command(
    target: Target,
    options: Sequence[str],
    *,
    names_model: bool = True,
    with_ready_check: bool = False,
    own_input_tokens: int | None = None,
) -> Command:
    python = target.program("vllm", "python")
    names = ["--model", target.model, "--tokenizer", str(target.tokenizer)] if names_model else []
    common = ["--base-url", target.url, *names]
    common += ["--num-prompts", str(_NUM_REQUESTS), "--percentile-metrics", "ttft,tpot,itl,e2el"]
    common += ["--metric-percentiles", ",".join(map(str, _PERCENTILES)), "--disable-tqdm"]
    common += ["--save-result", "--save-detailed", "--result-dir", str(target.folder)]
    common += ["--result-filename", _RESULT]
    source = target.environments / "vllm" / VLLM_SOURCE
    return Command(
        arguments=(python, str(_LAUNCHER), str(source), *common, *options),
        environment={**OFFLINE, "HF_HOME": str(target.folder), "VLLM_LOGGING_LEVEL": "ERROR"},
        read=lambda: read(target.folder / _RESULT, with_ready_check, own_input_tokens),
    )


def read(path: Path, with_ready_check: bool = False, own_input_tokens: int | None = None) -> Figures:
    """The figures of --save-result --save-detailed. with_ready_check: its first request was sent twice."""
    reported = json.loads(path.read_text("utf-8"))
    inputs, outputs = reported["input_lens"], reported["output_lens"]
    first = Figures(completed=1, input_tokens=inputs[0], output_tokens=outputs[0])
    return Figures(
        completed=reported["completed"],
        failed=reported["failed"],
        input_tokens=reported["total_input_tokens"],
        output_tokens=reported["total_output_tokens"],
        own_input_tokens=own_input_tokens,
        ttft=_latency(reported, "ttft", len(reported["ttfts"])),
        chunks=_latency(reported, "itl", sum(map(len, reported["itls"]))),
        tpot=_latency(reported, "tpot", sum(length > 1 for length in outputs)),
        e2e=_latency(reported, "e2el", reported["completed"]),
        drafts=_drafts(reported),
        also_sent=first if with_ready_check else None,
    )


def _latency(reported: dict[str, Any], name: str, count: int) -> Latency:
    percentiles = {each: reported[f"p{each}_{name}_ms"] for each in _PERCENTILES}
    return latency_ms(count, reported[f"mean_{name}_ms"], percentiles)


def _drafts(reported: dict[str, Any]) -> Drafts | None:
    """None: it did not print its block, because no draft token was verified."""
    if "spec_decode_num_drafts" not in reported:
        return None
    return Drafts(
        drafts=reported["spec_decode_num_drafts"],
        draft_tokens=reported["spec_decode_draft_tokens"],
        accepted_tokens=reported["spec_decode_accepted_tokens"],
        by_position=tuple(reported["spec_decode_per_position_acceptance_rates"]),
    )
