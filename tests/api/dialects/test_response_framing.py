"""Frames of responses. Arbiter: the types of the `openai` package, by which every event is checked."""

from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from faser.api.bodies.errors import HttpError
from faser.api.dialects.responses_answers import ResponseFraming
from faser.api.dialects.responses_requests import ResponsesBody, repeated
from tests.api.dialects.chunks import ARGUMENTS, ENVELOPE, TEXT, THINKING, choice, chunks, usage
from tests.api.dialects.events import typed_payloads

BODY = ResponsesBody.model_validate(
    {"input": "hi", "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]}
)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def framing() -> ResponseFraming:
    return ResponseFraming(ENVELOPE, repeated(BODY, ENVELOPE.sampling))


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


def test_log_probabilities_are_those_of_the_text_beside_reasoning_and_calls() -> None:
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
