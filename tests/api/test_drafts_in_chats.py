"""Calls, JSON and reasoning of a real engine that verifies 16 drafted tokens a step, compared with drafts off.

The drafts are what the answer without drafts was, so that calls, tags and the end of the reasoning come within one
step. Bugs that these tests have been seen to catch: half a mark passed on.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from faser.api.parsing.answer_parser import AnswerParsing
from faser.api.parsing.events import collect
from faser.api.parsing.registry import TOOL_PARSERS
from faser.engine.client.async_engine import AsyncEngine
from faser.engine.text.tokenizer import load_tokenizer
from tests.api.test_with_engine import CONFIG, scenario
from tests.api.test_with_engine import streamed as streamed_completion

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{# <tool_call> tools tool_calls #}"
GAMMA = 16
TOOL = {
    "type": "function",
    "function": {
        "name": "w",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "pattern": "^[a-z]{20,30}$"},
                "when": {"enum": ["today", "tomorrow"]},
            },
            "required": ["city", "when"],
            "additionalProperties": False,
        },
    },
}
KEYS = ("release_tag", "environment", "rollback_available")
SCHEMA = {
    "type": "object",
    "properties": {
        key: {"type": "boolean" if key.startswith("roll") else "string", "maxLength": 12} for key in KEYS
    },
    "required": list(KEYS),
    "additionalProperties": False,
}
REASONED = r"<think>\n[a-z ]{20,30}\n</think>\n\n[a-z]{3,9} CALL [a-z]{3,9}"
CALL = r'<tool_call>\n\{"name": "w", "arguments": \{"city": "[a-z]{20,30}"\}\}\n</tool_call>'
CASES: dict[str, dict[str, Any]] = {
    "calls": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    "json": {"response_format": {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA}}},
}


DRAFTING = replace(
    CONFIG,
    backend="native",
    max_model_len=1024,
    kv_cache_memory=4 << 20,
    num_threads=1,
    speculative_config={"method": "ngram", "num_speculative_tokens": GAMMA, "policy": "fixed"},
    per_request_spec_decode_metrics="detailed",
)


async def plain(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """(reasoning, content, calls, finish reason), and the metrics of speculation."""
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    document = answer.json()
    (choice,) = document["choices"]
    message = choice["message"]
    calls = [each["function"] for each in message.get("tool_calls") or ()]
    found = (message.get("reasoning_content") or "", message["content"] or "", calls, choice["finish_reason"])
    return found, document.get("metrics") or {}


async def streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
    answer = await client.post("/v1/chat/completions", json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    reasoning, content, finish = "", "", None
    calls: list[dict[str, str]] = []
    for line in answer.text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            delta = choice["delta"]
            reasoning += delta.get("reasoning_content") or ""
            content += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(calls):
                    calls.append({"name": call["function"]["name"], "arguments": ""})
                calls[call["index"]]["arguments"] += call["function"]["arguments"]
            finish = choice["finish_reason"] or finish
    return reasoning, content, calls, finish


@pytest.mark.parametrize("case", CASES)
@pytest.mark.full(but=("calls",))
def test_calls_and_json_are_the_same_with_drafts_of_16_tokens(
    tiny_checkpoint: Path, kernel_cache: Path, case: str
) -> None:
    del kernel_cache

    async def story(_engine: AsyncEngine, client: httpx.AsyncClient) -> None:
        most = 0
        for sampling in ({"temperature": 0}, {"temperature": 0.9, "seed": 7}):
            for max_tokens in (300, 45, 30):
                body = {
                    "messages": [{"role": "user", "content": f"{json.dumps(SCHEMA)} " * 2}],
                    "max_tokens": max_tokens,
                    "cache_salt": "mine",
                    **sampling,
                    **CASES[case],
                }
                expected, _ = await plain(client, {**body, "speculative": {"enabled": False}})
                reasoning, content, calls, finish = expected
                if max_tokens == 300:
                    assert finish == ("tool_calls" if calls else "stop"), expected
                    assert bool(calls) == (case == "calls")
                else:
                    assert finish == "length"
                written = reasoning + content + "".join(each["arguments"] for each in calls)
                drafted = {**body, "prediction": {"type": "content", "content": written}}
                for asked in (body, drafted):
                    found, metrics = await plain(client, asked)
                    assert found == expected
                    assert await streamed(client, asked) == expected
                    most = max(most, *metrics["speculative_decoding"]["per_step_accepted"])
        assert most == GAMMA

    scenario(tiny_checkpoint, story, DRAFTING, chat_template=TEMPLATE)


def test_reasoning_is_divided_off_the_same_with_drafts_of_16_tokens(
    tiny_checkpoint: Path, kernel_cache: Path
) -> None:
    """A chat's grammar leaves reasoning free, and the tiny model would not end it: the pieces of a completion."""
    del kernel_cache
    parsing = AnswerParsing(
        tokenizer=load_tokenizer(tiny_checkpoint),
        reasoning=True,
        tool_parser=TOOL_PARSERS["hermes"],
        declared={"w": {}},
    )

    def parsed(pieces: list[str], *, cut: bool) -> tuple[str, str, list[tuple[str, str]]]:
        parser = parsing.start("")
        events = [event for piece in pieces for event in parser.push(piece, (), complete=False)]
        message = collect(events + parser.push("", (), complete=True, cut=cut))
        return message.reasoning, message.content, [(call.name, call.arguments) for call in message.tool_calls]

    async def story(_engine: AsyncEngine, client: httpx.AsyncClient) -> None:
        most = 0
        for sampling in ({"temperature": 0}, {"temperature": 0.9, "seed": 7}):
            for max_tokens in (300, 100, 60, 40, 25):
                body: dict[str, Any] = {
                    "prompt": "Hi",
                    "max_tokens": max_tokens,
                    "guided_regex": REASONED.replace("CALL", CALL),
                }
                body |= {"cache_salt": "mine", **sampling}
                answer = await client.post("/v1/completions", json={**body, "speculative": {"enabled": False}})
                (choice,) = answer.json()["choices"]
                cut = choice["finish_reason"] == "length"
                assert cut == (max_tokens < 300)
                expected = parsed([choice["text"]], cut=cut)
                assert expected[0]
                assert max_tokens < 300 or (expected[1] and expected[2])
                drafted = {**body, "stream": True, "prediction": {"type": "content", "content": choice["text"]}}
                drafted |= {"stream_options": {"include_usage": True}}
                choices, metrics = await streamed_completion(client, drafted)
                pieces = [each["text"] for each in choices]
                assert len(pieces) < max_tokens / 3
                assert parsed(pieces, cut=cut) == expected
                most = max(most, *metrics["speculative_decoding"]["per_step_accepted"])
        assert most == GAMMA

    scenario(tiny_checkpoint, story, DRAFTING)
