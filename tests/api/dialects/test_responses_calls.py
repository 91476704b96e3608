"""Calls as items: the input of custom tools at every chunking, and shells and patches, which come whole."""

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from faser.api.dialects.responses_answers import ResponseFraming
from faser.api.dialects.responses_calls import InputReader
from faser.api.dialects.responses_requests import ResponsesBody, repeated
from faser.api.dialects.responses_tools import read_tools
from tests.api.dialects.chunks import ENVELOPE, usage
from tests.api.dialects.events import typed_payloads

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOLS: list[dict[str, Any]] = [
    {"type": "custom", "name": "patch"},
    {"type": "local_shell"},
    {"type": "shell"},
    {"type": "apply_patch"},
    {
        "type": "namespace",
        "name": "team__",
        "description": "",
        "tools": [{"type": "function", "name": "ask"}, {"type": "custom", "name": "write"}],
    },
]
TRICKY = 'a "b" \\ \n\t/ é 你 🙂 { } \u2028 \\u0041'


@pytest.mark.parametrize(
    "arguments, text",
    [
        (json.dumps({"input": TRICKY}), TRICKY),
        (json.dumps({"input": TRICKY}, ensure_ascii=False), TRICKY),
        ('\n { "input" :\t"\\u00e9\\/x" } ', "é/x"),
        ('{"input":""}', ""),
        ('{"input": "cut \\u00', "cut "),
        ('{"input": "cut \\', "cut "),
        ('{"input": "half \\ud83d', "half "),
        ('{"input": "alone \\ud83dx \\ud83d\\n"}', "alone \ufffdx \ufffd\n"),
        ('{"inp', ""),
        ("", ""),
        ('{"text": "other"}', '{"text": "other"}'),
        ("no JSON at all", "no JSON at all"),
        ('{"input": 5}', '{"input": 5}'),
    ],
)
def test_the_input_of_a_custom_tool_is_the_same_at_every_chunking(arguments: str, text: str) -> None:
    for size in range(1, len(arguments) + 2):
        reader = InputReader()
        pieces = [reader.take(arguments[begin : begin + size]) for begin in range(0, max(1, len(arguments)), size)]
        assert "".join(pieces) == text, size
        "".join(pieces).encode()  # no half of a surrogate pair is ever sent


def framing() -> ResponseFraming:
    body = ResponsesBody.model_validate({"input": "hi", "tools": TOOLS})
    return ResponseFraming(ENVELOPE, repeated(body, ENVELOPE.sampling), read_tools(TOOLS).by_name)


def answer(*calls: tuple[str, str], finish_reason: str = "tool_calls") -> dict[str, Any]:
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for at, (name, arguments) in enumerate(calls)
        ],
    }
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
    return framing().document([choice], [], usage())


def streamed(*calls: tuple[str, str], size: int, finish_reason: str = "tool_calls") -> list[dict[str, Any]]:
    frame, sent = framing(), b""

    def send(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
        chunk = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return frame.events([chunk], usage())

    for at, (name, arguments) in enumerate(calls):
        sent += send({"tool_calls": [{"index": at, "id": f"call_{at}", "function": {"name": name}}]})
        for begin in range(0, len(arguments), size):
            piece = {"arguments": arguments[begin : begin + size]}
            sent += send({"tool_calls": [{"index": at, "function": piece}]})
    return typed_payloads(sent + send({}, finish_reason) + frame.end(usage()))


PATCH = {"type": "update_file", "path": "a.txt", "diff": "@@\n-a\n+b\n"}
CALLS = (
    ("patch", json.dumps({"input": TRICKY})),
    ("local_shell", '{"command": ["ls", "-l"], "timeout_ms": 5}'),
    ("shell", '{"commands": ["ls", "pwd"]}'),
    ("apply_patch", json.dumps(PATCH)),
    ("apply_patch", '{"type": "delete_file", "path": "a.txt", "diff": ""}'),
    ("team__ask", '{"a": 1}'),
    ("team__write", '{"input": "x"}'),
    ("weather", "{}"),
)


def test_each_kind_of_call_is_the_item_of_its_tool() -> None:
    document = answer(*CALLS)
    Response.model_validate(document)
    items = [dict(item) for item in document["output"]]
    assert {item.pop("status") for item in items} == {"completed"}
    assert len({item.pop("id") for item in items}) == len(items)
    assert [item.pop("call_id") for item in items] == [f"call_{at}" for at in range(len(items))]
    assert items == [
        {"type": "custom_tool_call", "name": "patch", "input": TRICKY},
        {
            "type": "local_shell_call",
            "action": {"type": "exec", "env": {}, "command": ["ls", "-l"], "timeout_ms": 5},
        },
        {
            "type": "shell_call",
            "action": {"commands": ["ls", "pwd"], "timeout_ms": None, "max_output_length": None},
        },
        {"type": "apply_patch_call", "operation": PATCH},
        {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a.txt"}},
        {"type": "function_call", "name": "ask", "namespace": "team__", "arguments": '{"a": 1}'},
        {"type": "custom_tool_call", "name": "write", "namespace": "team__", "input": "x"},
        {"type": "function_call", "name": "weather", "arguments": "{}"},
    ]


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_stream_of_calls_has_published_events_and_ends_in_the_whole_response(size: int) -> None:
    events = streamed(*CALLS, size=size)
    for event in events:
        EVENT.validate_python(event)
    last, expected = events[-1]["response"], answer(*CALLS)
    for response in (last, expected):
        response.pop("completed_at")
    assert last == expected
    custom = [event for event in events if "custom_tool_call_input" in event["type"]]
    items = {event["item_id"] for event in custom}
    deltas = "".join(event.get("delta", "") for event in custom)
    done = [event["input"] for event in custom if event["type"].endswith(".done")]
    assert (deltas, done, len(items)) == (TRICKY + "x", [TRICKY, "x"], 2)
    added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    assert added == [item["id"] for item in expected["output"]]


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("local_shell", '{"command": "ls"}'),
        ("local_shell", '{"command": ["l'),
        ("shell", '{"commands": []}'),
        ("apply_patch", '{"type": "create_file", "path": "a"}'),
        ("apply_patch", '{"type": "move_file", "path": "a", "diff": ""}'),
    ],
)
@pytest.mark.parametrize("finish_reason", ["tool_calls", "length"])
def test_arguments_that_no_item_can_say_are_those_of_a_function(
    name: str, arguments: str, finish_reason: str
) -> None:
    document = answer((name, arguments), finish_reason=finish_reason)
    Response.model_validate(document)
    (item,) = document["output"]
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", name, arguments)
    assert item["status"] == ("completed" if finish_reason == "tool_calls" else "incomplete")
    last = streamed((name, arguments), size=2, finish_reason=finish_reason)[-1]["response"]
    assert last["output"] == document["output"]


def test_a_custom_call_that_the_length_cuts_is_incomplete() -> None:
    (item,) = answer(("patch", '{"input": "*** Beg'), finish_reason="length")["output"]
    assert (item["type"], item["input"], item["status"]) == ("custom_tool_call", "*** Beg", "incomplete")
