"""How results of each tool are read: files in the form that the tools write, cut to what is read."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import try_to_load_from_cache

from benchmarks.generators import aiperf, guidellm, vllm_bench
from benchmarks.generators.__main__ import RUNS
from benchmarks.generators.tool import Target, write_hub_cache


def written(path: Path, reported: Any) -> Path:
    path.write_text(json.dumps(reported), encoding="utf-8")
    return path


def target(tmp_path: Path) -> Target:
    (tmp_path / "run").mkdir()
    questions = tmp_path / "question.jsonl"
    questions.write_text('{"turns": ["one", "two"]}\n{"turns": ["alone"]}\n', encoding="utf-8")
    (tmp_path / "tokenizer").mkdir()
    return Target(
        url="http://127.0.0.1:1",
        model="tiny",
        root="org/tiny",
        tokenizer=tmp_path / "tokenizer",
        questions=questions,
        environments=tmp_path / "environments",
        folder=tmp_path / "run",
    )


def test_vllm_tells_tokens_latencies_and_drafts(tmp_path: Path) -> None:
    names = ("ttft", "tpot", "itl", "e2el")
    reported = {
        "completed": 2,
        "failed": 0,
        "total_input_tokens": 12,
        "total_output_tokens": 5,
        "input_lens": [7, 5],
        "output_lens": [4, 1],
        "ttfts": [0.1, 0.2],
        "itls": [[0.01, 0.02, 0.03], []],
        **{f"{kind}_{name}_ms": 20.0 for kind in ("mean", "p50", "p90", "p99") for name in names},
        "spec_decode_num_drafts": 2,
        "spec_decode_draft_tokens": 6,
        "spec_decode_accepted_tokens": 3,
        "spec_decode_per_position_acceptance_rates": [1.0, 0.5],
    }
    figures = vllm_bench.read(written(tmp_path / "result.json", reported), with_ready_check=True)
    assert (figures.completed, figures.input_tokens, figures.output_tokens) == (2, 12, 5)
    assert figures.also_sent is not None
    assert (figures.also_sent.input_tokens, figures.also_sent.output_tokens) == (7, 4)
    assert figures.ttft is not None
    assert figures.chunks is not None
    assert figures.tpot is not None
    assert (figures.ttft.count, figures.chunks.count, figures.tpot.count) == (2, 3, 1)
    assert (figures.ttft.mean_s, figures.ttft.percentiles[99]) == (0.02, 0.02)
    assert figures.drafts is not None
    assert figures.drafts.by_position == (1.0, 0.5)


def test_vllm_without_its_block_tells_no_drafts(tmp_path: Path) -> None:
    names = ("ttft", "tpot", "itl", "e2el")
    lists: dict[str, list[Any]] = {"input_lens": [1], "output_lens": [1], "ttfts": [0.1], "itls": [[]]}
    counts = {"completed": 1, "failed": 0, "total_input_tokens": 1, "total_output_tokens": 1}
    means = {f"{kind}_{name}_ms": 1.0 for kind in ("mean", "p50", "p90", "p99") for name in names}
    assert vllm_bench.read(written(tmp_path / "result.json", {**counts, **lists, **means})).drafts is None


def test_guidellm_tells_milliseconds_and_seconds(tmp_path: Path) -> None:
    metric = {"successful": {"count": 2, "mean": 3.0, "percentiles": {"p50": 2.0, "p90": 4.0, "p99": 4.0}}}
    metrics = {
        "request_totals": {"successful": 2, "errored": 1, "incomplete": 0},
        "prompt_token_count": {"successful": {"total_sum": 128.0}},
        "output_token_count": {"successful": {"total_sum": 64.0}},
        "time_to_first_token_ms": metric,
        "inter_token_latency_ms": metric,
        "request_latency": metric,
    }
    figures = guidellm.read(written(tmp_path / "result.json", {"benchmarks": [{"metrics": metrics}]}))
    assert (figures.completed, figures.failed, figures.input_tokens, figures.output_tokens) == (2, 1, 128, 64)
    assert figures.ttft is not None
    assert figures.e2e is not None
    assert (figures.ttft.mean_s, figures.e2e.mean_s, figures.e2e.percentiles[90]) == (0.003, 3.0, 4.0)


def test_aiperf_tells_usage_own_counts_and_who_left(tmp_path: Path) -> None:
    latency = {"count": 3, "avg": 5.0, "p50": 5.0, "p90": 6.0, "p99": 7.0}
    names = ("time_to_first_token", "inter_chunk_latency", "inter_token_latency", "request_latency")
    sums = {"total_usage_prompt_tokens": 282.0, "total_usage_completion_tokens": 96.0}
    own = {"total_isl": 192.0, "total_osl": 95.0, "request_count": 3.0}
    reported = {**dict.fromkeys(names, latency), **{name: {"avg": value} for name, value in (sums | own).items()}}
    written(tmp_path / "profile_export_aiperf.json", reported)
    records = [json.dumps({"metadata": {"was_cancelled": number == 3}}) for number in range(4)]
    (tmp_path / "profile_export.jsonl").write_text("\n".join(records), encoding="utf-8")
    figures = aiperf.read(tmp_path, in_chat=True)
    assert (figures.completed, figures.failed, figures.cancelled) == (3, 0, 1)
    assert (figures.input_tokens, figures.own_input_tokens, figures.own_output_tokens) == (282, 192, 95)
    assert (figures.ttft, figures.chunks) == (None, None)  # those of clients that left are not in them


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.tool} {run.name}")
def test_a_missing_tool_is_named_with_the_command_that_installs_it(run: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"benchmarks generators\.setup {run.tool}"):
        run.command(target(tmp_path))


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.tool} {run.name}")
def test_every_run_is_bounded_and_sent_to_the_server(run: Any, tmp_path: Path) -> None:
    """Bounded: by a number of requests, or by the documents of a task."""
    own = target(tmp_path)
    programs = own.environments / run.tool / "bin"
    programs.mkdir(parents=True)
    for name in ("python", run.tool):
        (programs / name).touch()
    words = " ".join(run.command(own).arguments)
    assert own.url in words
    assert any(limit in words for limit in ("--num-prompts", "max_requests", "--request-count", "--tasks"))


def test_a_tokenizer_is_found_in_the_hubs_cache_by_its_name(tmp_path: Path) -> None:
    """Oracle: the hub's own client."""
    own = target(tmp_path)
    written(own.tokenizer / "tokenizer.json", {"own": True})
    write_hub_cache(own, "org/tiny")
    found = try_to_load_from_cache("org/tiny", "tokenizer.json", cache_dir=own.folder / "hub")
    assert isinstance(found, str)
    assert json.loads(Path(found).read_text("utf-8")) == {"own": True}
