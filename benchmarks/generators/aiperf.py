"""aiperf: synthetic prompts, as chats and as completions, and clients that leave.

It counts tokens with its own tokenizer and compares them with the usage of the answers, and it scrapes /metrics.
What it calls inter-token latency is a mean of each request: a TPOT.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.generators.tool import OFFLINE, Command, Figures, Latency, Run, Target, latency_ms, write_hub_cache

_NUM_REQUESTS = 16
_INPUT_TOKENS = 64
_OUTPUT_TOKENS = 48
_PERCENTILES = (50, 90, 99)
_HUB_NAME = "faser/served"


def runs() -> tuple[Run, ...]:
    return (
        Run(name="synthetic, chat", tool="aiperf", distribution="aiperf", command=_chat),
        Run(name="synthetic, completions", tool="aiperf", distribution="aiperf", command=_completions),
        Run(name="clients that leave", tool="aiperf", distribution="aiperf", command=_cancelled),
    )


def _chat(target: Target) -> Command:
    """With a salt, so that a stream has one event a step, and goodput."""
    options = ["--endpoint-type", "chat", "--extra-inputs", "cache_salt:generators"]
    return _command(target, (*options, "--goodput", "time_to_first_token:1000 inter_token_latency:100"))


def _completions(target: Target) -> Command:
    return _command(target, ("--endpoint-type", "completions", "--extra-inputs", "ignore_eos:true"), in_chat=False)


def _cancelled(target: Target) -> Command:
    options = ["--endpoint-type", "chat", "--request-cancellation-rate", "50"]
    return _command(target, (*options, "--request-cancellation-delay", "0.3"))


def _command(target: Target, options: Sequence[str], *, in_chat: bool = True) -> Command:
    write_hub_cache(target, _HUB_NAME)  # without network aiperf accepts no folder as tokenizer
    common = ["--url", target.url, "--model", target.model, "--tokenizer", _HUB_NAME, "--streaming"]
    common += ["--concurrency", "4", "--request-count", str(_NUM_REQUESTS), "--isl", str(_INPUT_TOKENS)]
    common += ["--osl", str(_OUTPUT_TOKENS), "--random-seed", "1", "--ui", "simple"]
    common += ["--artifact-dir", str(target.folder)]
    return Command(
        arguments=(target.program("aiperf", "aiperf"), "profile", *common, *options),
        environment={**OFFLINE, "HF_HOME": str(target.folder)},
        read=lambda: read(target.folder, in_chat=in_chat),
    )


def read(folder: Path, *, in_chat: bool) -> Figures:
    """Its latencies leave out the clients that left; the server's TTFT and gaps between steps do not."""
    reported = json.loads((folder / "profile_export_aiperf.json").read_text("utf-8"))
    records = [json.loads(line) for line in (folder / "profile_export.jsonl").read_text("utf-8").splitlines()]
    cancelled = sum(each["metadata"]["was_cancelled"] for each in records)
    completed = round(reported["request_count"]["avg"])
    return Figures(
        completed=completed,
        failed=len(records) - completed - cancelled,
        cancelled=cancelled,
        input_tokens=round(reported["total_usage_prompt_tokens"]["avg"]),
        output_tokens=round(reported["total_usage_completion_tokens"]["avg"]),
        own_input_tokens=round(reported["total_isl"]["avg"]),
        own_output_tokens=round(reported["total_osl"]["avg"]),
        in_chat=in_chat,
        ttft=None if cancelled else _latency(reported["time_to_first_token"]),
        chunks=None if cancelled else _latency(reported["inter_chunk_latency"]),
        tpot=_latency(reported["inter_token_latency"]),
        e2e=_latency(reported["request_latency"]),
    )


def _latency(own: dict[str, Any]) -> Latency:
    return latency_ms(own["count"], own["avg"], {each: own[f"p{each}"] for each in _PERCENTILES})
