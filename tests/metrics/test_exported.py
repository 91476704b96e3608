"""What a server exports, held against the names, labels and buckets that dashboards and autoscalers query.

Oracle: the table below, written down from vLLM's documentation and from docs/speculation.md, not from the code,
but for the names of the drafters.
Left out of vLLM's: the series of `--legacy-vllm-metrics`, which is refused, and of `--kv-cache-metrics`, which has
none.

Planted bugs that these tests have caught: TTFT observed at the first token, so that aborted requests enter it; a
bucket of vLLM's left out; a mode without its series at first; accepted tokens counted under the next depth.
"""

import asyncio
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import httpx
import pytest

from faser.config.speculation import DRAFT_METHODS, SpeculationConfig
from faser.engine.client.async_engine import AsyncEngine
from faser.metrics.server import Metrics
from faser.types.request import SpeculationParams
from faser.types.statistics import AuditStats, EngineStats
from tests.api.test_with_engine import CONFIG, scenario

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5),
    *(10, 20, 40, 80, 160, 640, 2560),
)
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
# More than vLLM has: sums by `le` over a mixed fleet stay monotonic.
_FINER = (0.001, 0.0025, 0.005, 0.0075)
_FINER_REQUEST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
_GAMMA = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 32)
_TENTHS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
_ERROR = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1)

_REFUSED = ("queue_full", "key_limit", "target", "loading", "warming", "restarting", "draining", "dead")
_MODES = ("plain", "serial", "streams", "sm", "cores")
_CLASSES = ("default", "gold")
_ROLES = ("draft", "verify", "step")
_CAP, _MAX_MODEL_LEN = 3, 4096
_TOKENS = tuple(step * 10**power for power in range(4) for step in (1, 2, 5) if step * 10**power <= _MAX_MODEL_LEN)


@dataclass(frozen=True, kw_only=True)
class Family:
    """labels: other than model_name and engine, with all values that a first scrape has; ... : any one value."""

    kind: str
    name: str
    labels: dict[str, tuple[str, ...] | None] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()

    @property
    def sample(self) -> str:
        return {"counter": f"{self.name}_total", "histogram": f"{self.name}_count"}.get(self.kind, self.name)


def gauge(name: str, **labels: tuple[str, ...] | None) -> Family:
    return Family(kind="gauge", name=name, labels=labels)


def counter(name: str, **labels: tuple[str, ...] | None) -> Family:
    return Family(kind="counter", name=name, labels=labels)


def histogram(name: str, buckets: tuple[float, ...], **labels: tuple[str, ...] | None) -> Family:
    return Family(kind="histogram", name=name, buckets=buckets, labels=labels)


VLLM = (
    gauge("num_requests_running"),
    gauge("num_requests_waiting"),
    gauge("num_requests_waiting_by_reason", reason=("capacity", "deferred")),
    gauge("kv_cache_usage_perc"),
    gauge("engine_sleep_state", sleep_state=("awake", "weights_offloaded", "discard_all")),
    gauge("lora_requests_info", max_lora=("0",), waiting_lora_adapters=("",), running_lora_adapters=("",)),
    gauge(
        "cache_config_info",
        block_size=None,
        num_gpu_blocks=None,
        cache_dtype=None,
        kv_cache_size_tokens=None,
        kv_cache_max_concurrency=None,
    ),
    counter("prompt_tokens"),
    counter("prompt_tokens_by_source", source=("local_compute", "local_cache_hit")),
    counter("prompt_tokens_cached"),
    counter("generation_tokens"),
    counter("request_success", finished_reason=("stop", "length", "abort", "error")),
    counter("prefix_cache_queries"),
    counter("prefix_cache_hits"),
    counter("num_preemptions"),
    counter("corrupted_requests"),
    counter("admission_rejections", reason=_REFUSED),
    counter("external_prefix_cache_queries"),
    counter("external_prefix_cache_hits"),
    counter("mm_cache_queries"),
    counter("mm_cache_hits"),
    counter("spec_decode_num_drafts"),
    counter("spec_decode_num_draft_tokens"),
    counter("spec_decode_num_accepted_tokens"),
    counter("spec_decode_num_accepted_tokens_per_pos", position=("0", "1", "2")),
    histogram("time_to_first_token_seconds", _TTFT),
    histogram("inter_token_latency_seconds", (*_FINER, *_TOKEN)),
    histogram("request_time_per_output_token_seconds", (*_FINER, *_TOKEN)),
    *(
        histogram(name, (*_FINER_REQUEST, *_REQUEST))
        for name in (
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_inference_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
        )
    ),
    *(
        histogram(name, _TOKENS)
        for name in (
            "request_prompt_tokens",
            "request_generation_tokens",
            "request_max_num_generation_tokens",
            "request_params_max_tokens",
            "request_prefill_kv_computed_tokens",
        )
    ),
    histogram("request_params_n", (1, 2, 5, 10, 20)),
    histogram("iteration_tokens_total", (1, *(2**power for power in range(3, 15)))),
)

FASER = (
    histogram("spec_gamma", _GAMMA, **{"class": _CLASSES}),
    *(
        counter(f"spec_{name}_tokens", method=DRAFT_METHODS)
        for name in ("drafted", "verified", "accepted", "wasted")
    ),
    counter("spec_pruned_tokens", method=DRAFT_METHODS, stage=("trim", "layer", "frontier")),
    counter("spec_expected_accepted_tokens", method=DRAFT_METHODS),
    *(
        counter(f"spec_{name}_tokens_per_pos", **{"class": _CLASSES, "position": ("0", "1", "2")})
        for name in ("verified", "accepted")
    ),
    histogram("request_spec_acceptance_rate", _TENTHS, **{"class": _CLASSES}),
    *(counter(f"spec_{name}_seconds") for name in ("draft", "verify", "overlap", "decide")),
    *(counter(f"step_{name}_seconds", role=_ROLES) for name in ("predicted", "measured")),
    histogram("step_time_error_ratio", _ERROR, role=_ROLES),
    gauge("spec_policy_info", policy=("faser",), method=("auto",)),
    gauge("spec_synthetic"),
    gauge("spec_mode", mode=_MODES),
    counter("spec_mode_steps", mode=_MODES),
    counter("spec_mode_switches", **{"from": None, "to": None}),
    counter("spec_bypass_steps", reason=("load", "gain", "memory", "request")),
    gauge("sm_share", lane=("draft", "verify")),
    counter(
        "slo_requests",
        **{"class": _CLASSES, "target": ("ttft", "tpot", "both"), "result": ("met", "missed")},
    ),
    counter("admission_decisions", **{"class": _CLASSES, "decision": None, "target": None}),
    gauge("goodput_headroom", **{"class": _CLASSES, "share": ("0.9", "0.99")}),
    gauge("predicted_attainment_ratio", **{"class": _CLASSES}),
    gauge("predicted_ttft_seconds", statistic=("mean", "p99")),
    gauge("predicted_tpot_seconds", statistic=("mean",)),
    gauge("predicted_latency_seconds", statistic=("mean", "p99")),
    gauge("predicted_utilisation_ratio"),
    counter("spec_catchup_tokens"),
    counter("drafter_rebuilds", drafter=DRAFT_METHODS, cause=("uptime", "position", "prefix_hit")),
    counter("engine_restarts"),
    gauge("kv_disk_bytes"),
    counter("kv_disk_read_bytes"),
    counter("kv_disk_written_bytes"),
    counter("traffic_answers", outcome=("recorded", "withheld", "dropped", "failed")),
    gauge("engine_state", state=("loading", "warming", "ready", "restarting", "draining", "dead")),
)
FAMILIES = [
    *((f"vllm:{each.name}", each) for each in VLLM),
    *((f"faser_{each.name}", each) for each in FASER),
]
_NEVER_ZERO = {
    *("vllm:engine_sleep_state", "vllm:cache_config_info", "faser_engine_state"),
    *("faser_spec_policy_info", "faser_spec_mode", "faser_sm_share"),
    # Not a number until the latency model knows something.
    *("faser_goodput_headroom", "faser_predicted_attainment_ratio", "faser_predicted_utilisation_ratio"),
    *("faser_predicted_ttft_seconds", "faser_predicted_tpot_seconds", "faser_predicted_latency_seconds"),
}

Sample = tuple[str, dict[str, str], float]


def first_scrape() -> str:
    gold = SpeculationParams(class_name="gold")
    config = SpeculationConfig(num_speculative_tokens=_CAP, classes={"gold": gold})
    return Metrics(model_name="tiny", max_model_len=_MAX_MODEL_LEN, speculation=config).render().decode()


def samples(text: str) -> Iterator[Sample]:
    for line in text.splitlines():
        if not line.startswith("#"):
            series, value = line.rsplit(" ", 1)
            name, _, labels = series.partition("{")
            yield name, dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)


@pytest.mark.parametrize("prefixed, family", FAMILIES, ids=[name for name, _ in FAMILIES])
def test_a_first_scrape_has_the_family_with_all_its_labels(prefixed: str, family: Family) -> None:
    text = first_scrape()
    wanted = replace(family, name=prefixed)
    typed = wanted.sample if family.kind == "counter" else prefixed
    assert f"# TYPE {typed} {family.kind}\n" in text
    found = [(labels, value) for name, labels, value in samples(text) if name == wanted.sample]
    assert all(labels["model_name"] == "tiny" and labels["engine"] == "0" for labels, _ in found)
    named = {"model_name", "engine", *family.labels}
    assert {frozenset(labels) for labels, _ in found} == {frozenset(named)}
    known = {name: values for name, values in family.labels.items() if values is not None}
    combinations = {tuple(labels[name] for name in known) for labels, _ in found}
    assert combinations == set(product(*known.values()))
    assert prefixed in _NEVER_ZERO or not any(value for _, value in found)


@pytest.mark.parametrize(
    "prefixed, family",
    [(name, each) for name, each in FAMILIES if each.buckets],
    ids=[name for name, each in FAMILIES if each.buckets],
)
def test_buckets_are_those_documented(prefixed: str, family: Family) -> None:
    found = {labels["le"] for name, labels, _ in samples(first_scrape()) if name == f"{prefixed}_bucket"}
    assert found == {*(str(float(edge)) for edge in family.buckets), "+Inf"}


def test_no_label_is_there_that_is_not_documented() -> None:
    """So that no request id and no user's text ever becomes one."""
    documented = {"model_name", "engine", "le", "kind", "partition", "fallback"}
    documented |= {label for _, family in FAMILIES for label in family.labels}
    assert {label for _, labels, _ in samples(first_scrape()) for label in labels} == documented


def test_an_engine_that_audits_has_the_series_of_the_audit_at_zero_from_its_first_snapshot_on() -> None:
    """The label names the kernels, which are known once there is an engine."""
    metrics = Metrics(model_name="tiny", max_model_len=_MAX_MODEL_LEN)
    metrics.engine(EngineStats(audit=AuditStats(backend="native")))
    found = {
        name: (labels["backend"], value)
        for name, labels, value in samples(metrics.render().decode())
        if name.startswith("faser_audit_")
    }
    names = [f"faser_audit_{each}_total" for each in ("checks", "divergences", "skipped")]
    assert found == dict.fromkeys(names, ("native", 0))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_finds_no_fault_in_the_names_of_fasers_own_series() -> None:
    """vLLM's names have a colon, which promtool faults."""
    own = re.sub(r"^(# (HELP|TYPE) )?vllm:.*\n", "", first_scrape(), flags=re.MULTILINE)
    assert "faser_spec_gamma_bucket" in own
    done = subprocess.run(["promtool", "check", "metrics"], input=own, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_counts_of_a_server_that_has_served_add_up(tiny_checkpoint: Path) -> None:
    """Oracle: the identities that dashboards rely on. One request of three is aborted after its first token."""

    async def story(engine: AsyncEngine, client: httpx.AsyncClient) -> None:
        del engine
        before = dict(totals((await client.get("/metrics")).text))
        body = {"prompt": "hello hello hello hello", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        for speculative in ({"enabled": False}, {"class": "gold"}):
            answer = await client.post("/v1/completions", json={**body, "speculative": speculative})
            assert answer.status_code == 200, answer.text
        leaving = {**body, "max_tokens": 200, "stream": True, "speculative": {"enabled": False}}
        async with client.stream("POST", "/v1/completions", json=leaving) as stream:
            await anext(stream.aiter_lines())
        ended = "vllm:request_success_total"
        while (sums := dict(totals(text := (await client.get("/metrics")).text)))[ended] < 3:
            await asyncio.sleep(0.01)
        assert before.keys() <= sums.keys()
        by_method = [
            {
                name: sum(
                    value
                    for series, labels, value in samples(text)
                    if series == f"faser_spec_{name}_tokens_total" and labels["method"] == method
                )
                for name in ("drafted", "pruned", "verified", "accepted", "wasted")
            }
            for method in DRAFT_METHODS
        ]
        assert all(each["drafted"] == each["pruned"] + each["verified"] for each in by_method)
        assert all(each["verified"] == each["accepted"] + each["wasted"] for each in by_method)
        spec, own = "vllm:spec_decode_num_", "faser_spec_"
        assert sums[f"{own}accepted_tokens_total"] > 0
        for what in ("accepted", "verified"):
            assert sums[f"{own}{what}_tokens_total"] == sums[f"{own}{what}_tokens_per_pos_total"]
        series = (f"{spec}accepted_tokens_per_pos_total", f"{own}accepted_tokens_per_pos_total")
        depths = [
            {labels["position"]: value for name, labels, value in samples(text) if name == each and value}
            for each in series  # the drafts are all of one class
        ]
        assert depths[0] == depths[1]
        assert sums[f"{spec}accepted_tokens_per_pos_total"] == sums[f"{own}accepted_tokens_total"]
        assert sums[f"{spec}draft_tokens_total"] == sums[f"{own}verified_tokens_total"]
        assert sums[f"{own}gamma_sum"] == sums[f"{own}verified_tokens_total"]
        assert 'finished_reason="abort",model_name="tiny"} 1.0' in text
        timed = ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_decode_time")
        assert [sums[f"vllm:{name}_seconds_count"] for name in timed] == [2, 2, 2, 2]
        assert sums["vllm:request_params_n_count"] == 3
        assert sums["vllm:generation_tokens_total"] >= 60

    config = replace(
        CONFIG,
        num_threads=1,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": _CAP,
            "policy": "fixed",
            "classes": {"gold": {"slo": {"tpot_ms": 1000}}},
        },
    )
    scenario(tiny_checkpoint, story, config)


def totals(text: str) -> Iterator[tuple[str, float]]:
    """Each series' sum over its labels."""
    sums: dict[str, float] = {}
    for name, _, value in samples(text):
        sums[name] = sums.get(name, 0.0) + value
    yield from sums.items()
