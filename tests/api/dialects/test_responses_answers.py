"""Frames of responses. Arbiter: the types of the `openai` package, by which every event is checked.

Responses and events against the specification of Open Responses.

Source: openresponses/openresponses, schema/responses.tsp, items.tsp and events.tsp of 2026-04-24, and the cases
of its compliance tests. What must be there is restated here, by type. Events of reasoning have OpenAI's names, not
its own (response.reasoning.delta), because clients are OpenAI's.
"""

from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from faser.api.bodies.errors import HttpError
from faser.api.dialects.responses_answers import ResponseFraming
from faser.api.dialects.responses_requests import ResponsesBody, repeated
from tests.api.dialects.chunks import ARGUMENTS, ENVELOPE, TEXT, THINKING, choice, chunks, usage
from tests.api.dialects.events import typed_events, typed_payloads
from tests.fake_engine import FakeEngine, saying

BODY = ResponsesBody.model_validate(
    {"input": "hi", "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]}
)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def framing() -> ResponseFraming:
    return ResponseFraming(ENVELOPE, repeated(BODY, ENVELOPE.sampling), {})


def streamed(size: int, finish_reason: str = "tool_calls") -> list[dict[str, Any]]:
    frame = framing()
    sent = b"".join(frame.events([chunk], usage()) for chunk in chunks(size, finish_reason))
    return typed_payloads(sent + frame.end(usage()))


def whole() -> dict[str, Any]:
    return framing().document([choice()], [], usage())


def test_reasoning_text_and_calls_are_items_in_order() -> None:
    document = whole()
    Response.model_validate(document)
    reasoning, text, *calls = document["output"]
    assert [each["type"] for each in document["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": THINKING}]
    assert text["content"] == [{"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}]
    assert [(call["call_id"], call["name"], call["arguments"]) for call in calls] == [
        ("call_0", "weather", ARGUMENTS[0]),
        ("call_1", "weather", ARGUMENTS[1]),
    ]
    assert {each["status"] for each in document["output"]} == {document["status"]} == {"completed"}
    assert len({each["id"] for each in document["output"]}) == 4
    assert document["usage"]["input_tokens_details"]["cached_tokens"] == 3


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_every_event_has_the_published_type_and_the_stream_ends_in_the_whole_response(size: int) -> None:
    events = streamed(size)
    for event in events:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last["type"] == "response.completed"
    expected = whole()
    for response in (last["response"], expected):
        response.pop("completed_at")
    assert last["response"] == expected


@pytest.mark.parametrize("size", [1, 3, 100])
def test_deltas_join_to_what_the_done_events_say(size: int) -> None:
    """Oracle: a client that collects deltas by item, and takes nothing from done events."""
    collected: dict[str, str] = {}
    begun: dict[str, Any] = {}
    ended = []
    for event in streamed(size):
        match event["type"].removeprefix("response."):
            case "output_item.added":
                begun[event["item"]["id"]] = event["item"]
                assert event["output_index"] == len(begun) - 1
                assert event["item"]["status"] == "in_progress"
                assert not event["item"].get("content")
                assert not event["item"].get("arguments")
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                assert event["item_id"] in begun
                assert event["item_id"] not in ended
                collected[event["item_id"]] = collected.get(event["item_id"], "") + event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert collected[event["item_id"]] == event["text"]
            case "function_call_arguments.done":
                assert collected[event["item_id"]] == event["arguments"]
            case "output_item.done":
                ended.append(event["item"]["id"])
    assert list(begun) == ended == list(collected)
    assert list(collected.values()) == [THINKING, TEXT, *ARGUMENTS]


def position(text: str) -> dict[str, Any]:
    return {"token": text, "logprob": -1.0, "bytes": list(text.encode()), "top_logprobs": []}


def test_log_probabilities_are_those_of_the_text_next_to_reasoning_and_calls() -> None:
    """Tokens of markup and of calls have none; a token that is part of the text has."""
    said = ["<think>", THINKING[:9], THINKING[9:], "</think>", TEXT[:3], TEXT[3:], "<tool_call>", ARGUMENTS[0]]
    answer = choice() | {"logprobs": {"content": [position(each) for each in said]}}
    document = framing().document([answer], [], usage())
    assert [each["token"] for each in document["output"][1]["content"][0]["logprobs"]] == [TEXT[:3], TEXT[3:]]


def test_log_probabilities_of_a_stream_wait_for_the_text_of_their_tokens() -> None:
    frame = framing()

    def chunk(delta: dict[str, Any], token: str) -> dict[str, Any]:
        return {"index": 0, "delta": delta, "logprobs": {"content": [position(token)]}, "finish_reason": None}

    call = {"index": 0, "id": "c", "function": {"name": "weather", "arguments": "{}"}}
    steps = [
        chunk({"content": ""}, "<think>"),
        chunk({"reasoning_content": "Hm"}, "Hm"),
        chunk({"content": ""}, "a"),
        chunk({"content": "ab"}, "b"),
        chunk({"content": ""}, "<tool_call>"),
        chunk({"tool_calls": [call]}, "{}"),
    ]
    ended = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    sent = b"".join(frame.events([each], usage()) for each in [*steps, ended]) + frame.end(usage())
    output = typed_payloads(sent)[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert [each["token"] for each in output[1]["content"][0]["logprobs"]] == ["a", "b"]


def test_an_answer_cut_by_its_length_is_incomplete() -> None:
    events = streamed(4, "length")
    response = events[-1]["response"]
    assert events[-1]["type"] == "response.incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed"] * 3 + ["incomplete"]
    Response.model_validate(response)


def test_an_answer_without_a_token_has_an_empty_message() -> None:
    frame = framing()
    empty = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    events = typed_payloads(frame.events([empty], usage()) + frame.end(usage()))
    (item,) = events[-1]["response"]["output"]
    assert item["content"][0]["text"] == ""
    assert [event["type"].rpartition(".")[2] for event in events[2:]] == [
        "added",
        "added",
        "done",
        "done",
        "done",
        "completed",
    ]


def test_a_failure_ends_what_has_begun() -> None:
    frame = framing()
    begun = frame.events(list(chunks(5))[:4], usage())
    events = typed_payloads(begun + frame.failure(HttpError(500, "the engine died")))
    for event in events:
        EVENT.validate_python(event)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "the engine died"}
    assert [item["status"] for item in events[-1]["response"]["output"]] == ["incomplete"]


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
    frame = ResponseFraming(
        ENVELOPE, repeated(ResponsesBody.model_validate({"input": "hi"}), ENVELOPE.sampling), {}
    )
    sent = b"".join(frame.events([chunk], usage()) for chunk in chunks(size))
    response = check_stream(typed_payloads(sent + frame.end(usage())))
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", *["function_call"] * 2]


def test_an_image_is_refused_by_name_where_the_model_reads_text_only(http: httpx.Client) -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:image/png;base64,AA"}]
    answer = http.post(PATH, json={"input": [message("user", parts)]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input.0.content.1.type")
