"""Blocks of content as messages of a chat."""

from typing import Any

import pytest

from faser.api.dialects.messages_requests import chat_messages
from faser.errors import RequestError

RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "42"}]}
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}}


def test_the_system_prompt_comes_first_in_either_form() -> None:
    user = {"role": "user", "content": "hi"}
    assert chat_messages([user], "Be brief.") == [{"role": "system", "content": "Be brief."}, user]
    (system, _) = chat_messages([user], [text("a"), text("b")])
    assert system["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_results_of_tools_are_messages_of_their_own_in_the_order_of_the_blocks() -> None:
    read = chat_messages([{"role": "user", "content": [RESULT, text("and?"), RESULT]}], None)
    assert [message["role"] for message in read] == ["tool", "user", "tool"]
    assert read[0] == {"role": "tool", "tool_call_id": "t1", "content": [{"type": "text", "text": "42"}]}


def test_thinking_text_and_calls_are_one_message() -> None:
    blocks = [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, text("So "), text("then"), USE]
    (read,) = chat_messages([{"role": "assistant", "content": blocks}], None)
    assert read == {
        "role": "assistant",
        "content": "So then",
        "reasoning_content": "Hm.",
        "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
    }


@pytest.mark.parametrize(
    "role, block, param",
    [
        ("user", {"type": "image", "source": {}}, "messages.0.content.0.type"),
        ("user", {"type": "tool_result"}, "messages.0.content.0.tool_use_id"),
        ("user", {**RESULT, "content": [{"type": "image"}]}, "messages.0.content.0.content.0.type"),
        ("user", {"type": "text"}, "messages.0.content.0.text"),
        ("user", "hi", "messages.0.content.0"),
        ("assistant", {"type": "redacted_thinking", "data": "x"}, "messages.0.content.0.type"),
        ("assistant", {"type": "server_tool_use"}, "messages.0.content.0.type"),
        ("assistant", {**USE, "input": [1]}, "messages.0.content.0.input"),
        ("assistant", {**USE, "name": None}, "messages.0.content.0.name"),
        ("tool", text("hi"), "messages.0.role"),
    ],
)
def test_a_wrong_block_is_named(role: str, block: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat_messages([{"role": role, "content": [block]}], None)
    assert caught.value.param == param
