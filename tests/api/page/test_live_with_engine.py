"""The live feed over a real engine with a tiny model: its samples, added up, are what Prometheus scrapes."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from faser.engine.client.async_engine import AsyncEngine
from tests.api.test_with_engine import scenario

NUM_REQUESTS, NUM_TOKENS = 3, 24


async def scraped(client: httpx.AsyncClient) -> dict[tuple[str, ...], float]:
    """By name and by the values of the labels that are not the same everywhere."""
    text = (await client.get("/metrics")).text
    return {
        (
            sample.name,
            *(sample.labels[each] for each in sorted(sample.labels) if each not in ("engine", "model_name")),
        ): (sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_samples_add_up_to_what_is_scraped(tiny_checkpoint: Path) -> None:
    async def story(_: AsyncEngine, client: httpx.AsyncClient) -> None:
        samples: list[dict[str, Any]] = []
        began_s = time.monotonic()
        async with client.stream("GET", "/live") as answer:
            lines = (line async for line in answer.aiter_lines() if line)
            samples += json.loads((await anext(lines))[6:])["history"]
            bodies = [
                {
                    "prompt": "hello hello hello hello",
                    "max_tokens": NUM_TOKENS,
                    "temperature": 0,
                    "ignore_eos": True,
                    "speculative": {"slo": {"ttft_ms": 60_000, "tpot_ms": 0.0001}},
                }
                for _ in range(NUM_REQUESTS)
            ]
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
            ended_s = time.monotonic()
            assert all(each.json()["usage"]["completion_tokens"] == NUM_TOKENS for each in answers)
            async for line in lines:
                samples.append(json.loads(line[6:])["sample"])
                if began_s + sum(each["dt"] for each in samples) > ended_s + 0.1 and "timeline" not in samples[-1]:
                    break
        counted = await scraped(client)
        spent = NUM_REQUESTS * NUM_TOKENS

        assert sum(each.get("output", 0) for each in samples) == spent
        assert spent == counted["vllm:generation_tokens_total",]
        assert sum(each.get("prompt", 0) for each in samples) == counted["vllm:prompt_tokens_total",]
        assert sum(each.get("queries", 0) for each in samples) == counted["vllm:prefix_cache_queries_total",]
        assert sum(each.get("hits", 0) for each in samples) == counted["vllm:prefix_cache_hits_total",]
        length = sum(each.get("finished", {}).get("length", 0) for each in samples)
        assert length == counted["vllm:request_success_total", "length"] == NUM_REQUESTS

        reported = [each["speculation"] for each in samples if "speculation" in each]
        for kind in ("drafted", "verified", "accepted"):
            for method in ("suffix", "ngram"):
                here = sum(each.get("drafters", {}).get(method, {}).get(kind, 0) for each in reported)
                assert here == counted[f"faser_spec_{kind}_tokens_total", method], (kind, method)
        assert (
            sum(sum(each.get("accepted_at", ())) for each in reported)
            == counted["vllm:spec_decode_num_accepted_tokens_total",]
        )
        assert (
            sum(sum(each.get("gammas", ())) for each in reported) == counted["faser_spec_gamma_count", "default"]
        )
        for mode in ("plain", "serial"):
            steps = sum(each.get("modes", {}).get(mode, 0) for each in reported)
            assert steps == counted["faser_spec_mode_steps_total", mode]
        measured_ms = 1e3 * counted["faser_step_measured_seconds_total", "step"]
        assert sum(each.get("measured_ms", 0) for each in reported) == pytest.approx(measured_ms, abs=0.1)

        slo = [each["slo"]["default"] for each in samples if "slo" in each]
        assert (
            sum(each["ttft"][0] for each in slo) == counted["faser_slo_requests_total", "default", "met", "ttft"]
        )
        assert (
            sum(each["tpot"][1] for each in slo)
            == counted["faser_slo_requests_total", "default", "missed", "tpot"]
        )

        latencies = samples[-1]["latencies"]
        for kind, name in (
            ("ttft", "time_to_first_token_seconds"),
            ("itl", "inter_token_latency_seconds"),
            ("tpot", "request_time_per_output_token_seconds"),
        ):
            count, p50, p95, p99 = latencies[kind]
            assert count == counted[f"vllm:{name}_count",]
            assert p50 <= p95 <= p99
            edges = [float(key[1]) for key in counted if key[0] == f"vllm:{name}_bucket"]
            above = min(each for each in edges if counted[f"vllm:{name}_bucket", _edge(each)] >= 0.99 * count)
            assert p99 <= 1e3 * above * 1.03
        # Steps are reported one by one, but for the very first one, which has none before it.
        assert (
            sum(len(each.get("timeline", ())) for each in samples)
            >= sum(each.get("steps", 0) for each in samples) - 1
        )

    scenario(tiny_checkpoint, story)


def _edge(value: float) -> str:
    return "+Inf" if value == float("inf") else str(value)
