"""Frames of messages. Arbiter: the types of the `anthropic` package, by which every event is checked."""

import json
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from faser.api.bodies.errors import HttpError
from faser.api.dialects.messages_answers import MessageFraming
from tests.api.dialects.chunks import ARGUMENTS, ENVELOPE, TEXT, THINKING, choice, chunks, usage
from tests.api.dialects.events import typed_payloads

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def streamed(size: int, finish_reason: str = "tool_calls") -> list[dict[str, Any]]:
    frame = MessageFraming(ENVELOPE)
    sent = b"".join(frame.events([chunk], usage()) for chunk in chunks(size, finish_reason))
    return typed_payloads(sent + frame.end(usage()))


def whole(**ending: Any) -> dict[str, Any]:
    return MessageFraming(ENVELOPE).document([choice(**ending)], [], usage())


def test_thinking_text_and_calls_are_blocks_in_order() -> None:
    document = whole()
    Message.model_validate(document)
    thinking, text, *calls = document["content"]
    assert thinking == {"type": "thinking", "thinking": THINKING, "signature": ""}
    assert text == {"type": "text", "text": TEXT}
    assert [(call["id"], call["name"], call["input"]) for call in calls] == [
        ("call_0", "weather", json.loads(ARGUMENTS[0])),
        ("call_1", "weather", json.loads(ARGUMENTS[1])),
    ]
    assert document["stop_reason"] == "tool_use"
    assert (document["usage"]["input_tokens"], document["usage"]["cache_read_input_tokens"]) == (4, 3)


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_every_event_has_the_published_type_and_the_blocks_join_to_the_whole_message(size: int) -> None:
    """Oracle: a client that collects deltas by block."""
    events = streamed(size)
    for event in events:
        EVENT.validate_python(event)
    assert [event["type"] for event in (events[0], *events[-2:])] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    blocks: list[dict[str, Any]] = []
    pieces = ""
    open_index = None
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert open_index is None
                open_index = event["index"]
                assert open_index == len(blocks)
                blocks.append(event["content_block"])
                pieces = ""
            case "content_block_delta":
                assert event["index"] == open_index
                (text,) = (value for key, value in event["delta"].items() if key != "type")
                pieces += text
            case "content_block_stop":
                assert event["index"] == open_index
                open_index = None
                block = blocks[-1]
                key = {"thinking": "thinking", "text": "text", "tool_use": "input"}[block["type"]]
                assert not block[key]
                block[key] = json.loads(pieces) if key == "input" else pieces
    assert open_index is None
    assert blocks == whole()["content"]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


@pytest.mark.parametrize(
    "finish_reason, stop_reason, expected",
    [
        ("stop", None, ("end_turn", None)),
        ("stop", 2, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("length", None, ("max_tokens", None)),
        ("tool_calls", None, ("tool_use", None)),
    ],
)
def test_the_reason_for_the_end(finish_reason: str, stop_reason: Any, expected: Any) -> None:
    ended = choice(finish_reason, stop_reason)
    del ended["message"]["tool_calls"]
    document = MessageFraming(ENVELOPE).document([ended], [], usage())
    assert (document["stop_reason"], document["stop_sequence"]) == expected


@pytest.mark.parametrize("finish_reason, expected", [("stop", "tool_use"), ("length", "max_tokens")])
def test_a_message_with_a_call_ends_with_tool_use_unless_it_was_cut(finish_reason: str, expected: str) -> None:
    assert whole(finish_reason=finish_reason)["stop_reason"] == expected
    assert streamed(5, finish_reason)[-2]["delta"]["stop_reason"] == expected


def test_arguments_cut_by_the_length_are_kept_as_text() -> None:
    cut = choice("length")
    cut["message"]["tool_calls"][1]["function"]["arguments"] = '{"city": "Be'
    document = MessageFraming(ENVELOPE).document([cut], [], usage())
    assert document["content"][-1]["input"] == {"arguments": '{"city": "Be'}
    Message.model_validate(document)


def test_a_failure_is_an_error_event() -> None:
    frame = MessageFraming(ENVELOPE)
    sent = frame.events(list(chunks(5))[:4], usage()) + frame.failure(HttpError(503, "the engine died"))
    last = typed_payloads(sent)[-1]
    assert last == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "the engine died"},
        "request_id": "me",
    }
