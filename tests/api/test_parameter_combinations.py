"""Forty-nine combinations of parameters over HTTP: speculation changes no token, log probability or finish reason.

Oracle: the same server without drafts. float32 on the native kernels, eight requests at once; two ways of
drafting, of which one drafts in every step.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from faser.config.engine import EngineConfig
from tests.api.test_with_engine import running

_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"
_LOOP = "hello world hello world hello world hello"
_SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "size": {"type": "integer", "maximum": 99}},
    "required": ["colour", "size"],
    "additionalProperties": False,
}
_JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": _SCHEMA}}
_GREEDY = {"temperature": 0}
_WARM = {"temperature": 0.9, "seed": 5}
_TOLERANCE = 1e-4
_TOOLS = [{"type": "function", "function": {"name": "paint", "parameters": _SCHEMA}}]
_NAMED = {"type": "function", "function": {"name": "paint"}}

TEXTS: list[dict[str, Any]] = [
    _GREEDY,
    _GREEDY | {"logprobs": 3},
    _GREEDY | {"logprobs": 2, "echo": True},
    _GREEDY | {"ignore_eos": True, "max_tokens": 60},
    _GREEDY | {"n": 3},
    _GREEDY | {"stop": ["he", "wo"]},
    _GREEDY | {"stop": ["e"], "include_stop_str_in_output": True, "logprobs": 0},
    _GREEDY | {"stop_token_ids": list(range(40, 140)), "min_tokens": 5},
    _GREEDY | {"frequency_penalty": 0.7},
    _GREEDY | {"presence_penalty": -0.5, "logprobs": 1},
    _GREEDY | {"repetition_penalty": 1.3},
    _GREEDY | {"logit_bias": {"40": 5, "41": -100}, "logprobs": 2},
    _GREEDY | {"allowed_token_ids": list(range(30, 90)), "ignore_eos": True},
    _GREEDY | {"bad_words": ["hello", "he"], "logprobs": 1},
    _GREEDY | {"prompt_logprobs": 1, "logprobs": 1},
    _GREEDY | {"truncate_prompt_tokens": 3},
    _GREEDY | {"stream": True, "logprobs": 1},
    _WARM,
    _WARM | {"logprobs": 4},
    _WARM | {"top_p": 0.6},
    _WARM | {"top_k": 5, "logprobs": 1},
    _WARM | {"min_p": 0.1},
    _WARM | {"top_p": 0.9, "top_k": 30, "min_p": 0.02, "n": 2, "logprobs": 1},
    _WARM | {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    _WARM | {"logit_bias": {"50": 3}, "min_p": 0.05, "logprobs": 2},
    _WARM | {"bad_words": ["world"], "top_k": 40},
    _WARM | {"ignore_eos": True, "max_tokens": 64, "stream": True},
    _WARM | {"min_tokens": 12, "max_tokens": 13},
    _WARM | {"temperature": 1.7, "seed": 9, "logprobs": 1},
    _GREEDY | {"structured_outputs": {"regex": "(ab|cd){4,9}x"}, "max_tokens": 40, "logprobs": 1},
    _WARM | {"structured_outputs": {"choice": ["yes", "no", "maybe later"]}, "logprobs": 1},
    _WARM | {"structured_outputs": {"json": _SCHEMA}, "max_tokens": 90},
    _GREEDY | {"structured_outputs": {"grammar": 'root ::= ("a" | "b") root | "."'}, "max_tokens": 30},
    _GREEDY | {"prediction": {"type": "content", "content": _LOOP}, "max_tokens": 50},
]
CHATS: list[dict[str, Any]] = [
    _GREEDY,
    _GREEDY | {"logprobs": True, "top_logprobs": 2},
    _WARM | {"logprobs": True},
    _WARM | {"n": 2, "top_p": 0.8, "stream": True},
    _GREEDY | {"continue_final_message": True, "echo": True},
    _GREEDY | {"response_format": {"type": "json_object"}, "max_tokens": 60, "logprobs": True},
    _WARM | {"response_format": _JSON_FORMAT, "max_tokens": 90, "logprobs": True},
    _GREEDY | {"response_format": _JSON_FORMAT, "max_tokens": 90, "stream": True},
    _GREEDY | {"response_format": _JSON_FORMAT, "max_tokens": 90, "repetition_penalty": 1.2},
    _WARM | {"structured_outputs": {"regex": "[a-f]{3,20}"}, "logit_bias": {"40": 4}, "min_tokens": 3},
    _WARM | {"stop": ["o"], "max_completion_tokens": 20},
    _GREEDY | {"tools": _TOOLS, "tool_choice": "required", "max_tokens": 120},
    _WARM | {"tools": _TOOLS, "tool_choice": _NAMED, "max_tokens": 120, "logprobs": True},
    _WARM | {"tools": _TOOLS, "tool_choice": "required", "max_tokens": 120, "stream": True},
    _GREEDY | {"tools": _TOOLS, "tool_choice": "none", "max_tokens": 30},
]


def _bodies() -> list[tuple[str, dict[str, Any]]]:
    messages = [{"role": "user", "content": _LOOP}, {"role": "assistant", "content": "world hello"}]
    common = {"return_token_ids": True}
    texts = [(_TEXT, {"max_tokens": 24, "prompt": _LOOP, **common, **each}) for each in TEXTS]
    chats = [(_CHAT, {"max_tokens": 24, "messages": messages, **common, **each}) for each in CHATS]
    return texts + chats


async def _answers(checkpoint: Path, speculation: dict[str, Any]) -> tuple[list[Any], int]:
    """What each combination is answered, and how many draft tokens were accepted."""
    config = EngineConfig(
        dtype="float32",
        backend="native",
        max_model_len=1024,
        max_num_seqs=8,
        kv_cache_memory=16 << 20,
        speculative_config=speculation,
    )
    async with running(checkpoint, config) as (engine, client):
        waiting = asyncio.Semaphore(8)

        async def ask(route: str, body: dict[str, Any]) -> Any:
            async with waiting:
                return _read(await client.post(route, json=body))

        found = await asyncio.gather(*(ask(route, body) for route, body in _bodies()))
        stats = engine.stats.speculation
        return list(found), 0 if stats is None else sum(each.accepted for each in stats.methods)


def _read(answer: httpx.Response) -> list[dict[str, Any]]:
    """Text, token ids, log probabilities and reasons of each choice; of a stream, joined."""
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        documents = [answer.json()]
    else:
        documents = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    choices: dict[int, dict[str, Any]] = {}
    for document in documents:
        assert "error" not in document, document
        for choice in document["choices"]:
            joined = choices.setdefault(
                choice["index"], {"text": "", "token_ids": [], "logprobs": [], "reasons": []}
            )
            said = choice.get("message") or choice.get("delta") or {}
            joined["text"] += choice.get("text") or said.get("content") or ""
            joined["token_ids"] += choice.get("token_ids") or []
            joined["logprobs"] += _numbers(choice.get("logprobs")) + _numbers(choice.get("prompt_logprobs"))
            if choice["finish_reason"] is not None:
                joined["reasons"].append((choice["finish_reason"], choice["stop_reason"]))
    return [choices[index] for index in sorted(choices)]


def _numbers(report: Any) -> list[float]:
    """All numbers in a report of log probabilities, by the order of its keys."""
    if isinstance(report, dict):
        return [number for key in sorted(report) if key != "bytes" for number in _numbers(report[key])]
    if isinstance(report, list):
        return [number for each in report for number in _numbers(each)]
    return [float(report)] if isinstance(report, int | float) else []


@pytest.fixture(scope="module")
def undrafted(tiny_checkpoint: Path) -> list[Any]:
    found, accepted = asyncio.run(_answers(tiny_checkpoint, {"policy": "off"}))
    assert accepted == 0
    return found


@pytest.mark.parametrize("method", ["auto", "draft_model"])
@pytest.mark.full(but=("draft_model",))
def test_speculation_changes_no_token_logprob_or_reason(
    tiny_checkpoint: Path, undrafted: list[Any], method: str
) -> None:
    speculation = {"method": method, "policy": "fixed", "num_speculative_tokens": 4}
    if method == "draft_model":
        speculation["model"] = str(tiny_checkpoint)
    found, accepted = asyncio.run(_answers(tiny_checkpoint, speculation))
    assert accepted > 100
    assert len(found) == len(_bodies()) >= 40
    for (_, body), with_drafts, without in zip(_bodies(), found, undrafted, strict=True):
        assert len(with_drafts) == len(without), body
        for one, other in zip(with_drafts, without, strict=True):
            assert one["token_ids"] == other["token_ids"], body
            assert one["text"] == other["text"], body
            assert one["reasons"] == other["reasons"], body
            assert one["logprobs"] == pytest.approx(other["logprobs"], abs=_TOLERANCE), body
