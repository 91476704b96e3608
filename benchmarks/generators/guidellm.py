"""guidellm: synthetic prompts, as chats and as completions. Its ITL is a mean of each request, so a TPOT."""

import json
from pathlib import Path
from typing import Any

from benchmarks.generators.tool import OFFLINE, Command, Figures, Latency, Run, Target, latency_ms

_RESULT = "result.json"
_NUM_REQUESTS = 16
_INPUT_TOKENS = 64
_OUTPUT_TOKENS = 48
_PERCENTILES = (50, 90, 99)


def runs() -> tuple[Run, ...]:
    return (
        Run(name="synthetic, chat", tool="guidellm", distribution="guidellm", command=_chat),
        Run(name="synthetic, completions", tool="guidellm", distribution="guidellm", command=_completions),
    )


def _chat(target: Target) -> Command:
    return _command(target, "/v1/chat/completions", "kind=concurrent,streams=4")


def _completions(target: Target) -> Command:
    return _command(target, "/v1/completions", "kind=poisson,rate=4")


def _command(target: Target, route: str, profile: str) -> Command:
    backend = f"kind=openai_http,target={target.url},model={target.model},request_format={route}"
    data = f"kind=synthetic_text,prompt_tokens={_INPUT_TOKENS},output_tokens={_OUTPUT_TOKENS}"
    path = target.folder / _RESULT
    options = ["--backend", backend, "--profile", profile, "--data", data]
    options += ["--constraint", f"kind=max_requests,count={_NUM_REQUESTS}"]
    options += ["--tokenizer", f"kind=huggingface_auto,model={target.tokenizer}"]
    options += ["--disable-console-interactive", "--output", f"kind=json,path={path}"]
    return Command(
        arguments=(target.program("guidellm", "guidellm"), "run", *options),
        environment=OFFLINE,
        read=lambda: read(path),
    )


def read(path: Path) -> Figures:
    (reported,) = json.loads(path.read_text("utf-8"))["benchmarks"]
    metrics, totals = reported["metrics"], reported["metrics"]["request_totals"]
    return Figures(
        completed=totals["successful"],
        failed=totals["errored"],
        cancelled=totals["incomplete"],
        input_tokens=round(metrics["prompt_token_count"]["successful"]["total_sum"]),
        output_tokens=round(metrics["output_token_count"]["successful"]["total_sum"]),
        ttft=_latency(metrics["time_to_first_token_ms"]),
        tpot=_latency(metrics["inter_token_latency_ms"]),
        e2e=_latency(metrics["request_latency"], unit_ms=1000),
    )


def _latency(metric: dict[str, Any], unit_ms: float = 1) -> Latency:
    own = metric["successful"]
    percentiles = {each: unit_ms * own["percentiles"][f"p{each}"] for each in _PERCENTILES}
    return latency_ms(own["count"], unit_ms * own["mean"], percentiles)
