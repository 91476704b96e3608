"""Answers of every dialect are the same whether or not another client has asked the same before.

Headers, events, usage, metrics and errors are compared, but for ids and dates. One server has heard the victim's
requests, the other has not. docs/security.md says what clients can learn of each other.
"""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from faser.engine.text.tokenizer import load_tokenizer
from tests.api.server import MODEL
from tests.api.test_with_engine import CONFIG, running, scrape

VICTIM, ATTACKER = "the-victims-key", "the-attackers-key"
TEXT = "the quick brown fox jumps over the lazy dog while seven wizards quietly judge my vow"
DRAFTING = replace(
    CONFIG,
    backend="native",
    num_threads=1,
    seed=3,
    speculative_config={"method": "suffix", "num_speculative_tokens": 4, "policy": "fixed"},
    per_request_spec_decode_metrics="detailed",
)
_OWN = re.compile(r'"(\w*id|created|created_at|completed_at)": ?("[^"]*"|[0-9.]+)|request [\w-]+')


def _null(own: re.Match[str]) -> str:
    return "" if own[1] is None else f'"{own[1]}":null'


Answer = tuple[int, list[tuple[str, str]], list[str]]


def bodies(token_id: int) -> list[tuple[str, dict[str, Any]]]:
    """One request for each dialect, and two whose limits leave no token after five of them. token_id: of those."""
    usual = {"temperature": 0, "max_tokens": 30}
    talk = [{"role": "user", "content": TEXT}]
    failing = {"allowed_token_ids": [token_id], "bad_words": ["xxxxxx"], "prompt": "a fox", **usual}
    return [
        ("/v1/completions", {"prompt": TEXT, "ignore_eos": True, "logprobs": 1, **usual}),
        ("/v1/chat/completions", {"messages": talk, "ignore_eos": True, **usual}),
        ("/v1/responses", {"input": TEXT, "temperature": 0, "max_output_tokens": 30}),
        ("/v1/messages", {"messages": talk, **usual}),
        ("/v1/completions", failing),
    ]


async def answer(http: httpx.AsyncClient, path: str, body: dict[str, Any], key: str) -> Answer:
    """Status, headers and lines, without what is each answer's own."""
    if body.get("stream") and "max_output_tokens" not in body and path != "/v1/messages":
        body = {**body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    found = await http.post(path, json={"model": MODEL, **body}, headers={"authorization": f"Bearer {key}"})
    headers = [(k, v) for k, v in found.headers.items() if k not in ("date", "content-length", "x-request-id")]
    return found.status_code, sorted(headers), _OWN.sub(_null, found.text).splitlines()


def heard(checkpoint: Path, *, after_the_victim: bool, **settings: Any) -> tuple[list[Answer], list[float]]:
    """What the attacker gets, and what the operator scrapes: cached prompt tokens and accepted draft tokens."""
    (token_id,) = load_tokenizer(checkpoint).encode("x")

    async def run() -> tuple[list[Answer], list[float]]:
        async with running(checkpoint, DRAFTING, **settings) as (_, http):
            if after_the_victim:
                for path, body in bodies(token_id):
                    await answer(http, path, {k: v for k, v in body.items() if k != "bad_words"}, VICTIM)
            counted = [scrape((await http.get("/metrics")).text)[name] for name in _COUNTERS]
            found = [
                await answer(http, path, {**body, "stream": streams}, ATTACKER)
                for streams in (False, True)
                for path, body in bodies(token_id)
            ]
            after = [scrape((await http.get("/metrics")).text)[name] for name in _COUNTERS]
        return found, [b - a for a, b in zip(counted, after, strict=True)]

    return asyncio.run(run())


_COUNTERS = ("vllm:prefix_cache_hits_total", "faser_spec_accepted_tokens_total")


@pytest.mark.parametrize(
    "settings, shared",
    [
        pytest.param({"api_keys": (VICTIM, ATTACKER)}, False, id="keys"),
        pytest.param({"api_keys": (VICTIM, ATTACKER), "share_cache_across_keys": True}, True, id="shared keys"),
        pytest.param({}, True, id="no keys"),
    ],
)
@pytest.mark.full(but=("keys", "no keys"))
def test_answers_do_not_show_whether_another_client_asked_the_same(
    tiny_checkpoint: Path, settings: dict[str, Any], shared: bool
) -> None:
    alone, counts_alone = heard(tiny_checkpoint, after_the_victim=False, **settings)
    after, counts_after = heard(tiny_checkpoint, after_the_victim=True, **settings)
    assert after == alone
    assert (counts_after != counts_alone) == shared, "a shared cache helps, and another key's does not"
    statuses = [status for status, _, _ in alone]
    assert statuses == [200, 200, 200, 200, 400, 200, 200, 200, 200, 200]
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in alone[-1][2] if '"text"' in line)
    assert text == "xxxxx"
    assert any("no token to choose" in line for line in alone[-1][2])
