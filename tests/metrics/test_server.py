"""Metrics: names, labels and buckets that dashboards query, and numbers that add up."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from faser.metrics.server import REJECTION_REASONS, Metrics
from faser.types.answer import FinishReason
from faser.types.engine import EngineState
from faser.types.statistics import AuditStats, EngineStats, KvDiskStats

LABELS = {"model_name": "tiny", "engine": "0"}


def metrics(max_model_len: int = 4096) -> Metrics:
    return Metrics(model_name="tiny", max_model_len=max_model_len)


def samples(source: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What a scraper reads: (name, further labels) to value."""
    found = {}
    for family in text_string_to_metric_families(source.render().decode()):
        for sample in family.samples:
            assert {name: sample.labels.pop(name) for name in LABELS} == LABELS
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def value(source: Metrics, name: str, /, **labels: str) -> float:
    return samples(source)[f"vllm:{name}", tuple(sorted(labels.items()))]


def edges(source: Metrics, name: str) -> list[float]:
    wanted = f"vllm:{name}_bucket"
    return [float(labels[0][1]) for (found, labels) in samples(source) if found == wanted][:-1]


@pytest.mark.parametrize(
    "name, labels",
    [
        ("num_requests_running", {}),
        ("num_requests_waiting", {}),
        ("num_requests_waiting_by_reason", {"reason": "capacity"}),
        ("num_requests_waiting_by_reason", {"reason": "deferred"}),
        ("kv_cache_usage_perc", {}),
        ("engine_sleep_state", {"sleep_state": "discard_all"}),
        ("prompt_tokens_total", {}),
        ("prompt_tokens_by_source_total", {"source": "local_cache_hit"}),
        ("prompt_tokens_cached_total", {}),
        ("generation_tokens_total", {}),
        ("prefix_cache_queries_total", {}),
        ("prefix_cache_hits_total", {}),
        ("num_preemptions_total", {}),
        ("corrupted_requests_total", {}),
        ("spec_decode_num_drafts_total", {}),
        ("spec_decode_num_draft_tokens_total", {}),
        ("spec_decode_num_accepted_tokens_total", {}),
        *(
            ("request_success_total", {"finished_reason": reason})
            for reason in ("stop", "length", "abort", "error")
        ),
        *(("admission_rejections_total", {"reason": reason}) for reason in REJECTION_REASONS),
        *(
            (f"{name}_count", {})
            for name in (
                "time_to_first_token_seconds",
                "inter_token_latency_seconds",
                "request_time_per_output_token_seconds",
                "e2e_request_latency_seconds",
                "request_queue_time_seconds",
                "request_inference_time_seconds",
                "request_prefill_time_seconds",
                "request_decode_time_seconds",
                "request_prompt_tokens",
                "request_generation_tokens",
                "request_params_max_tokens",
                "request_max_num_generation_tokens",
                "request_prefill_kv_computed_tokens",
                "request_num_preemptions",
                "request_params_n",
                "iteration_tokens_total",
            )
        ),
    ],
)
def test_series_exists_at_zero_from_the_first_scrape(name: str, labels: dict[str, str]) -> None:
    assert value(metrics(), name, **labels) == 0


def test_no_series_tells_when_it_was_created() -> None:
    assert "_created" not in metrics().render().decode()


def test_latency_buckets_hold_every_edge_that_dashboards_of_vllm_use() -> None:
    """Oracle: the lists as vLLM documents them."""
    ttft = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
    assert edges(metrics(), "time_to_first_token_seconds") == [*ttft, 160, 640, 2560]
    itl = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
    assert edges(metrics(), "inter_token_latency_seconds") == [0.001, 0.0025, 0.005, 0.0075, *itl]
    e2e = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
    assert edges(metrics(), "e2e_request_latency_seconds") == [0.005, 0.01, 0.025, 0.05, 0.1, 0.2, *e2e]


def test_token_buckets_end_at_the_context_length() -> None:
    assert edges(metrics(300), "request_prompt_tokens") == [1, 2, 5, 10, 20, 50, 100, 200]
    assert edges(metrics(0), "request_prompt_tokens")[-1] == 100_000


def test_tokens_and_bytes_of_kv_on_disk_are_counted() -> None:
    source = metrics()
    source.engine(EngineStats(num_steps=1))
    for stats in (
        KvDiskStats(queries=100, hits=64, num_bytes=5000, read_bytes=700, written_bytes=900),
        KvDiskStats(queries=300, hits=160, num_bytes=6000, read_bytes=1700, written_bytes=1000),
    ):
        source.engine(EngineStats(num_steps=2, kv_disk=stats))
    assert value(source, "external_prefix_cache_queries_total") == 300
    assert value(source, "external_prefix_cache_hits_total") == 160
    found = {name: number for (name, _), number in samples(source).items() if name.startswith("faser_kv_disk")}
    assert found["faser_kv_disk_bytes"] == 6000
    assert found["faser_kv_disk_read_bytes_total"] == 1700
    assert found["faser_kv_disk_written_bytes_total"] == 1000


def test_engine_counters_grow_by_what_the_snapshots_grew() -> None:
    source = metrics()
    source.engine(EngineStats(num_steps=1, prompt_tokens=10, prefix_cache_queries=10, last_step_rows=10))
    source.engine(
        EngineStats(
            num_steps=2,
            num_running=3,
            num_waiting=2,
            kv_usage=0.25,
            prompt_tokens=30,
            prefix_cache_queries=30,
            prompt_tokens_cached=16,
            prefix_cache_hits=24,
            generation_tokens=7,
            num_preemptions=1,
            last_step_rows=4,
        )
    )
    source.engine(
        EngineStats(
            num_steps=2,
            prompt_tokens=30,
            prompt_tokens_cached=16,
            prefix_cache_hits=24,
            prefix_cache_queries=30,
            generation_tokens=7,
            num_preemptions=1,
        )
    )
    assert value(source, "prompt_tokens_total") == 30
    assert value(source, "prompt_tokens_cached_total") == 16
    assert value(source, "prefix_cache_hits_total") == 24
    assert value(source, "prompt_tokens_by_source_total", source="local_compute") == 14
    assert value(source, "prompt_tokens_by_source_total", source="local_cache_hit") == 16
    assert value(source, "prefix_cache_queries_total") == 30
    assert value(source, "generation_tokens_total") == 7
    assert value(source, "num_preemptions_total") == 1
    assert value(source, "iteration_tokens_total_count") == 2
    assert value(source, "iteration_tokens_total_sum") == 10 + (20 - 16) + 7
    assert value(source, "num_requests_running") == value(source, "num_requests_waiting") == 0


def test_gauges_show_the_latest_snapshot() -> None:
    source = metrics()
    source.engine(EngineStats(num_running=3, num_waiting=2, kv_usage=0.25))
    assert value(source, "num_requests_running") == 3
    assert value(source, "num_requests_waiting") == 2
    assert value(source, "num_requests_waiting_by_reason", reason="capacity") == 2
    assert value(source, "kv_cache_usage_perc") == 0.25


def finish(source: Metrics, reason: FinishReason, generation_tokens: int = 5) -> None:
    source.finished(
        reason,
        ttft_s=0.625,
        e2e_s=2.0,
        queue_s=0.25,
        prefill_s=0.75,
        decode_s=1.0,
        prompt_tokens=8,
        cached_tokens=3,
        generation_tokens=generation_tokens,
        longest_generation=4,
        preemptions=2,
    )


def test_finished_request_enters_every_latency() -> None:
    source = metrics()
    finish(source, FinishReason.STOP)
    assert value(source, "request_success_total", finished_reason="stop") == 1
    assert value(source, "time_to_first_token_seconds_sum") == 0.625
    assert value(source, "e2e_request_latency_seconds_sum") == 2.0
    assert value(source, "request_queue_time_seconds_sum") == 0.25
    assert value(source, "request_prefill_time_seconds_sum") == 0.75
    assert value(source, "request_decode_time_seconds_sum") == 1.0
    assert value(source, "request_inference_time_seconds_sum") == 1.75
    assert value(source, "request_time_per_output_token_seconds_sum") == 0.25
    assert value(source, "request_prompt_tokens_sum") == 8
    assert value(source, "request_generation_tokens_sum") == 5
    assert value(source, "request_max_num_generation_tokens_sum") == 4
    assert value(source, "request_prefill_kv_computed_tokens_sum") == 5
    assert value(source, "request_num_preemptions_sum") == 2


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_aborted_and_failed_requests_are_counted_but_enter_no_latency(reason: FinishReason) -> None:
    source = metrics()
    finish(source, reason)
    assert value(source, "request_success_total", finished_reason=reason) == 1
    assert all(number == 0 for (name, _), number in samples(source).items() if name.endswith("seconds_count"))


def test_one_token_has_no_time_per_output_token() -> None:
    source = metrics()
    finish(source, FinishReason.LENGTH, generation_tokens=1)
    assert value(source, "request_time_per_output_token_seconds_count") == 0


def test_first_chunk_of_a_sample_has_no_gap() -> None:
    source = metrics()
    source.tokens(1, None)
    source.tokens(3, 0.004)
    assert value(source, "inter_token_latency_seconds_count") == 1
    assert value(source, "inter_token_latency_seconds_sum") == 0.004


def test_admission_observes_what_was_asked_for() -> None:
    source = metrics()
    source.admitted(n=2, max_tokens=100, prompt_tokens=8)
    source.rejected("queue_full")
    assert value(source, "request_params_n_sum") == 2
    assert value(source, "request_params_max_tokens_sum") == 100
    assert value(source, "admission_rejections_total", reason="queue_full") == 1


def test_cache_config_replaces_the_unknown_shape() -> None:
    source = metrics()
    source.separate_layers(3)
    source.cache_config(block_size=16, num_gpu_blocks=1024, cache_dtype="int8", max_model_len=4090)
    shapes = [dict(labels) for (name, labels) in samples(source) if name == "vllm:cache_config_info"]
    assert shapes == [
        {
            "block_size": "16",
            "num_gpu_blocks": "1024",
            "cache_dtype": "int8",
            "kv_cache_size_tokens": "16384",
            "kv_cache_max_concurrency": "4.00",
        }
    ]


def test_an_engine_that_ended_runs_nothing_and_the_next_one_counts_on() -> None:
    source = metrics()
    source.engine(EngineStats(num_running=3, num_waiting=2, kv_usage=0.5, num_steps=9, generation_tokens=100))
    source.engine_ended(restarts=True)
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert value(source, gauge) == 0
    source.engine(EngineStats(num_running=1, num_steps=1, generation_tokens=7))
    assert value(source, "num_requests_running") == 1
    assert value(source, "generation_tokens_total") == 107
    assert samples(source)["faser_engine_restarts_total", ()] == 1


def test_exactly_the_current_state_of_the_engine_is_1() -> None:
    source = metrics()

    def states() -> dict[str, float]:
        found = samples(source)
        return {each: found["faser_engine_state", (("state", each),)] for each in EngineState}

    assert [each for each, is_current in states().items() if is_current] == ["loading"]
    source.engine_state(EngineState.RESTARTING)
    assert [each for each, is_current in states().items() if is_current] == ["restarting"]
    assert sum(states().values()) == 1


def test_an_audits_counts_carry_the_name_of_the_kernels() -> None:
    source = metrics()
    source.engine(EngineStats(audit=AuditStats(backend="native", checks=3)))
    source.engine(EngineStats(audit=AuditStats(backend="native", checks=5, divergences=1, skipped=2)))
    source.engine_ended(restarts=True)
    source.engine(EngineStats(audit=AuditStats(backend="native", checks=1)))
    found = samples(source)
    names = ("checks", "divergences", "skipped")
    counts = [found[f"faser_audit_{name}_total", (("backend", "native"),)] for name in names]
    assert counts == [6, 1, 2]


def test_the_adapters_of_requests_are_labels_of_one_series() -> None:
    found = Metrics(model_name="tiny", max_model_len=4096, max_loras=4)

    def labels() -> list[dict[str, str]]:
        wanted = "vllm:lora_requests_info"
        return [dict(own) for (name, own), at_s in samples(found).items() if name == wanted and at_s > 0]

    assert labels() == []
    found.engine(EngineStats(running_adapters=("poems", "sql"), waiting_adapters=("laws",)))
    assert labels() == [
        {"max_lora": "4", "running_lora_adapters": "poems,sql", "waiting_lora_adapters": "laws"},
    ]
    before = found.render()
    found.engine(EngineStats(running_adapters=("poems", "sql"), waiting_adapters=("laws",)))
    assert found.render() == before
    found.engine_ended(restarts=True)
    assert labels() == [{"max_lora": "4", "running_lora_adapters": "", "waiting_lora_adapters": ""}]
