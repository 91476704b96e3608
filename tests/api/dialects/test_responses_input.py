"""Items of a conversation as messages of a chat."""

from typing import Any

import pytest

from faser.api.dialects.responses_input import chat_messages
from faser.errors import RequestError

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "42"}
THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
}


def said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [part]}


def test_a_string_is_what_the_user_says_and_instructions_come_first() -> None:
    assert chat_messages("hi", "Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


def test_reasoning_text_and_calls_in_succession_are_one_turn() -> None:
    read = chat_messages([{"role": "user", "content": "hi"}, THOUGHT, said("So: "), CALL, CALL, RESULT], None)
    assert [message["role"] for message in read] == ["user", "assistant", "tool"]
    turn = read[1]
    assert turn["reasoning_content"] == "Hm."
    assert turn["content"] == [{"type": "text", "text": "So: "}]
    assert [call["function"] for call in turn["tool_calls"]] == [{"name": "f", "arguments": "{}"}] * 2
    assert read[2] == {"role": "tool", "tool_call_id": "c1", "content": "42"}


def test_what_the_assistant_says_after_calls_or_again_is_a_turn_of_its_own() -> None:
    read = chat_messages([said("a"), said("b"), CALL, said("c"), THOUGHT, THOUGHT], None)
    assert [sorted(set(message) - {"role"}) for message in read] == [
        ["content"],
        ["content", "tool_calls"],
        ["content"],
        ["content", "reasoning_content"],
        ["content", "reasoning_content"],
    ]


@pytest.mark.parametrize(
    "item, param",
    [
        ({"type": "item_reference", "id": "x"}, "input.0.type"),
        ({"type": "web_search_call", "id": "x"}, "input.0.type"),
        ({"type": "message", "role": "tool", "content": "x"}, "input.0.role"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input.0.content.0.type"),
        ({"role": "user", "content": 5}, "input.0.content"),
        ({"role": "user"}, "input.0.content"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input.0.call_id"),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}, "input.0.arguments"),
        (
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]},
            "input.0.output.0.type",
        ),
        ({"type": "reasoning", "summary": [], "encrypted_content": "x"}, "input.0.encrypted_content"),
        ({}, "input.0.type"),
    ],
)
def test_a_wrong_item_is_named(item: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat_messages([item], None)
    assert caught.value.param == param
    assert param.rpartition(".")[0] in str(caught.value)


@pytest.mark.parametrize("texts", [[], [{"type": "summary_text", "text": "hm"}]])
def test_reasoning_alone_is_refused_and_reasoning_without_words_is_no_turn(texts: list[dict[str, Any]]) -> None:
    reasoning = {"type": "reasoning", "summary": texts}
    with pytest.raises(RequestError, match="nothing but reasoning; it must have a message"):
        chat_messages([reasoning, reasoning], None)
    read = chat_messages([{"role": "user", "content": "hi"}, reasoning], None)
    assert [message["role"] for message in read] == (["user", "assistant"] if texts else ["user"])


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(RequestError, match="at least one item"):
        chat_messages([], None)
