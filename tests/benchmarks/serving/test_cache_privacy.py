"""The attack on past answers and prompts, against a real engine: it works on one's own, and on nobody else's."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.serving.cache_privacy import SIGNS, Finding, Findings, attack, client
from tests.api.test_with_engine import CONFIG, running, scrape

PROBES, ANSWERS, TOKENS = 20, 2, 48
VICTIM, ATTACKER = "the-victims-key", "the-attackers-key"
# Every draft that is found is verified, so that an attack does not depend on what pays on this machine.
DRAFTING = replace(
    CONFIG,
    num_threads=1,
    seed=3,
    speculative_config={"method": "suffix", "num_speculative_tokens": 4, "policy": "fixed"},
    per_request_spec_decode_metrics="detailed",
)


def attacked(
    checkpoint: Path, *, victim: str = VICTIM, attacker: str = ATTACKER, trace: bool = False, **settings: Any
) -> Findings:
    async def run() -> Findings:
        async with running(checkpoint, DRAFTING, **settings) as (_, http):
            with client(str(http.base_url), victim) as one, client(str(http.base_url), attacker) as other:
                return await asyncio.to_thread(
                    attack, one, other, probes=PROBES, answers=ANSWERS, tokens=TOKENS, trace=trace
                )

    return asyncio.run(run())


def test_the_attack_reads_answers_under_ones_own_key(tiny_checkpoint: Path) -> None:
    """So it would read those of others, too, if they were within reach."""
    found = attacked(tiny_checkpoint, attacker=VICTIM, api_keys=(VICTIM, ATTACKER))
    assert found.learned
    assert found.guesses["accepted"] == Finding(right=PROBES // 2, wrong=0)
    assert found.guesses["two tokens in one event"] == Finding(right=PROBES // 2, wrong=0)
    assert found.prompts == Finding(right=ANSWERS, wrong=0)
    assert found.changed >= PROBES // 2


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"api_keys": (VICTIM, ATTACKER)}, id="keys"),
        pytest.param({"api_keys": (VICTIM, ATTACKER), "share_cache_across_keys": True}, id="keys share the cache"),
        pytest.param({}, id="no keys", marks=pytest.mark.full),
    ],
)
@pytest.mark.full(but=("keys",))
def test_no_answer_shows_anything_of_another_clients(tiny_checkpoint: Path, settings: dict[str, Any]) -> None:
    found = attacked(tiny_checkpoint, **settings)
    assert not found.learned
    assert found.changed == 0
    assert (found.num_right, found.num_wrong, found.num_prompts) == (PROBES // 2, PROBES // 2, ANSWERS)
    assert found.guesses == dict.fromkeys(SIGNS, Finding(right=0, wrong=0))
    assert found.prompts == Finding(right=0, wrong=0)


@pytest.mark.full
def test_a_trace_shows_ones_own_answers_and_those_of_no_other_key(tiny_checkpoint: Path) -> None:
    keys = (VICTIM, ATTACKER)
    found = attacked(tiny_checkpoint, attacker=VICTIM, api_keys=keys, trace=True)
    assert found.guesses["a token traced to a draft"] == Finding(right=PROBES // 2, wrong=0)
    found = attacked(tiny_checkpoint, api_keys=keys, trace=True)
    assert not found.learned
    assert found.guesses == dict.fromkeys(SIGNS, Finding(right=0, wrong=0))


@pytest.mark.parametrize("settings", [{"api_keys": (VICTIM, ATTACKER), "share_cache_across_keys": True}, {}])
@pytest.mark.full
def test_where_past_answers_are_shared_a_trace_is_refused(tiny_checkpoint: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(httpx.HTTPStatusError, match="400"):
        attacked(tiny_checkpoint, trace=True, **settings)


@pytest.mark.full
def test_a_shared_cache_is_used_though_answers_do_not_show_it(tiny_checkpoint: Path) -> None:
    """Without keys a repeated question is drafted from its answer, and the bytes of the answer stay the same."""

    async def run() -> None:
        async with running(tiny_checkpoint, DRAFTING) as (_, http):
            body = {
                "prompt": "Once upon a time",
                "max_tokens": 60,
                "temperature": 1,
                "seed": 1,
                "ignore_eos": True,
            }
            body |= {"stream": True, "return_token_ids": True}
            body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
            answers, drafted = [], []
            for _ in range(3):
                lines = (await http.post("/v1/completions", json=body)).text.splitlines()
                events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
                answers.append([{**event, "id": "", "created": 0} for event in events])
                drafted.append(scrape((await http.get("/metrics")).text)["faser_spec_accepted_tokens_total"])
        assert drafted[1] - drafted[0] > 20
        assert [each["usage"]["completion_tokens"] for each in answers[1]] == [*range(1, 61), 60]
        assert answers[0] == answers[1] == answers[2]

    asyncio.run(run())


def test_gaps_between_the_tokens_of_a_sample_are_counted_by_step(tiny_checkpoint: Path) -> None:
    """Whether or not the tokens of a step are sent one by one."""

    async def run() -> list[float]:
        counts = [0.0]
        async with running(tiny_checkpoint, replace(DRAFTING, enable_prefix_caching=False)) as (_, http):
            body = {"prompt": "hello hello hello hello", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
            for salt in ("one", None):
                answer = await http.post("/v1/completions", json={**body, "cache_salt": salt})
                assert answer.status_code == 200
                scraped = scrape((await http.get("/metrics")).text)
                counts.append(scraped["vllm:inter_token_latency_seconds_count"])
        return counts

    _, salted, both = asyncio.run(run())
    assert both == 2 * salted < 2 * 59
