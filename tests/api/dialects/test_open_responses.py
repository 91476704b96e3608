"""Responses and events against the specification of Open Responses.

Source: openresponses/openresponses, schema/responses.tsp, items.tsp and events.tsp of 2026-04-24, and the cases
of its compliance tests. What must be there is restated here, by type. Events of reasoning have OpenAI's names, not
its own (response.reasoning.delta), because clients are OpenAI's.
"""

from typing import Any

import httpx
import pytest

from faser.api.dialects.responses_answers import ResponseFraming
from faser.api.dialects.responses_requests import ResponsesBody, repeated
from tests.api.dialects.chunks import ENVELOPE, chunks, usage
from tests.api.dialects.events import typed_events, typed_payloads
from tests.fake_engine import FakeEngine, saying

PATH = "/v1/responses"

TEXT_OR_NULL = (str, type(None))
INTEGER_OR_NULL = (int, type(None))
RESPONSE: dict[str, Any] = {
    "id": str,
    "object": str,
    "created_at": int,
    "completed_at": INTEGER_OR_NULL,
    "status": str,
    "incomplete_details": (dict, type(None)),
    "model": str,
    "previous_response_id": TEXT_OR_NULL,
    "instructions": TEXT_OR_NULL,
    "output": list,
    "error": (dict, type(None)),
    "tools": list,
    "tool_choice": (str, dict),
    "truncation": str,
    "parallel_tool_calls": bool,
    "text": dict,
    "top_p": (int, float),
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
    "top_logprobs": int,
    "temperature": (int, float),
    "reasoning": (dict, type(None)),
    "usage": (dict, type(None)),
    "max_output_tokens": INTEGER_OR_NULL,
    "max_tool_calls": INTEGER_OR_NULL,
    "store": bool,
    "background": bool,
    "service_tier": str,
    "metadata": dict,
    "safety_identifier": TEXT_OR_NULL,
    "prompt_cache_key": TEXT_OR_NULL,
}
USAGE = {
    "input_tokens": int,
    "output_tokens": int,
    "total_tokens": int,
    "input_tokens_details": dict,
    "output_tokens_details": dict,
}
ITEMS: dict[str, dict[str, Any]] = {
    "message": {"id": str, "status": str, "role": str, "content": list},
    "function_call": {"id": str, "call_id": str, "name": str, "arguments": str, "status": str},
    "reasoning": {"id": str, "summary": list, "content": list},
}
PARTS: dict[str, dict[str, Any]] = {
    "output_text": {"text": str, "annotations": list, "logprobs": list},
    "reasoning_text": {"text": str},
}
_OF_ITEM = {"output_index": int, "item": dict}
_OF_PART = {"item_id": str, "output_index": int, "content_index": int}
EVENTS: dict[str, dict[str, Any]] = {
    **{
        f"response.{name}": {"response": dict}
        for name in ("created", "in_progress", "completed", "incomplete", "failed")
    },
    "response.output_item.added": _OF_ITEM,
    "response.output_item.done": _OF_ITEM,
    "response.content_part.added": {**_OF_PART, "part": dict},
    "response.content_part.done": {**_OF_PART, "part": dict},
    "response.output_text.delta": {**_OF_PART, "delta": str},
    "response.output_text.done": {**_OF_PART, "text": str},
    "response.reasoning_text.delta": {**_OF_PART, "delta": str},
    "response.reasoning_text.done": {**_OF_PART, "text": str},
    "response.function_call_arguments.delta": {"item_id": str, "output_index": int, "delta": str},
    "response.function_call_arguments.done": {"item_id": str, "output_index": int, "arguments": str},
}


def check(value: dict[str, Any], fields: dict[str, Any]) -> None:
    for name, kind in fields.items():
        assert name in value, name
        assert isinstance(value[name], kind), (name, value[name])


def check_response(response: dict[str, Any]) -> None:
    check(response, RESPONSE)
    if response["usage"] is not None:
        check(response["usage"], USAGE)
        check(response["usage"]["input_tokens_details"], {"cached_tokens": int})
        check(response["usage"]["output_tokens_details"], {"reasoning_tokens": int})
    for item in response["output"]:
        check_item(item)


def check_item(item: dict[str, Any]) -> None:
    check(item, ITEMS[item["type"]])
    for part in item.get("content", ()):
        check(part, PARTS[part["type"]])
    assert None not in (item.get("encrypted_content", ""), item.get("phase", ""))  # absent, but never null


def check_stream(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response at its end."""
    for event in events:
        check(event, {"sequence_number": int, **EVENTS[event["type"]]})
        if "response" in event:
            check_response(event["response"])
        if "item" in event:
            check_item(event["item"])
    assert events[0]["type"] == "response.created"
    response: dict[str, Any] = events[-1]["response"]
    return response


def message(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


CASES = {
    "basic": [message("user", "Say hello.")],
    "system prompt": [message("system", "You are a pirate."), message("user", "Say hello.")],
    "developer": [message("developer", "You are a pirate."), message("user", "Say hello.")],
    "several turns": [
        message("user", "My name is Alice."),
        message("assistant", "Hello Alice!"),
        message("user", "What is my name?"),
    ],
    "parts": [message("user", [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}])],
}


@pytest.mark.parametrize("given", CASES.values(), ids=CASES)
def test_a_response_is_complete_and_so_is_its_stream(
    http: httpx.Client, engine: FakeEngine, given: list[dict[str, Any]]
) -> None:
    engine.script = saying("Ahoy!")
    whole = http.post(PATH, json={"input": given}).json()
    check_response(whole)
    assert (whole["status"], len(whole["output"])) == ("completed", 1)
    response = check_stream(typed_events(http.post(PATH, json={"input": given, "stream": True})))
    assert response["output"][0]["content"] == whole["output"][0]["content"]


def test_a_response_that_is_cut_says_so(http: httpx.Client, engine: FakeEngine) -> None:
    engine.script = saying("Ahoy!")
    body = {"input": "hi", "max_output_tokens": 3, "stream": True}
    response = check_stream(typed_events(http.post(PATH, json=body)))
    assert (response["status"], response["completed_at"]) == ("incomplete", None)


@pytest.mark.parametrize("size", [1, 100])
def test_reasoning_and_calls_are_complete_too(size: int) -> None:
    frame = ResponseFraming(ENVELOPE, repeated(ResponsesBody.model_validate({"input": "hi"}), ENVELOPE.sampling))
    sent = b"".join(frame.events([chunk], usage()) for chunk in chunks(size))
    response = check_stream(typed_payloads(sent + frame.end(usage())))
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", *["function_call"] * 2]


def test_an_image_is_refused_by_name_where_the_model_reads_text_only(http: httpx.Client) -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:image/png;base64,AA"}]
    answer = http.post(PATH, json={"input": [message("user", parts)]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input.0.content.1.type")
