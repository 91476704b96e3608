"""Blocks of content as messages of a chat."""

from typing import Any

import pytest

from faser.api.dialects.messages_input import chat_messages
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


PLAIN = {"type": "text", "media_type": "text/plain", "data": "Once upon a time"}


@pytest.mark.parametrize(
    "block, words",
    [
        ({"type": "document", "source": PLAIN, "citations": {"enabled": True}}, "Once upon a time"),
        (
            {"type": "document", "source": PLAIN, "title": "Tale", "context": "For children"},
            "Tale\nFor children\nOnce upon a time",
        ),
        ({"type": "document", "source": {"type": "content", "content": "a"}, "title": None}, "a"),
        ({"type": "document", "source": {"type": "content", "content": [text("a"), text("b")]}}, "a\nb"),
        ({"type": "search_result", "title": "T", "source": "http://x", "content": [text("a")]}, "T\nhttp://x\na"),
        ({"type": "tool_reference", "tool_name": "weather"}, "weather"),
    ],
)
def test_blocks_of_plain_text_are_text(block: dict[str, Any], words: str) -> None:
    (said,) = chat_messages([{"role": "user", "content": [block]}], None)
    assert said == {"role": "user", "content": [{"type": "text", "text": words}]}
    (result,) = chat_messages([{"role": "user", "content": [{**RESULT, "content": [block]}]}], None)
    assert result["content"] == [{"type": "text", "text": words}]


def test_redacted_thinking_is_left_out() -> None:
    blocks = [{"type": "redacted_thinking", "data": "x"}, text("So")]
    assert chat_messages([{"role": "assistant", "content": blocks}], None) == [
        {"role": "assistant", "content": "So"}
    ]


@pytest.mark.parametrize(
    "role, block, param",
    [
        ("user", {"type": "image", "source": {}}, "messages.0.content.0.type"),
        ("user", {"type": "tool_result"}, "messages.0.content.0.tool_use_id"),
        ("user", {**RESULT, "content": [{"type": "image"}]}, "messages.0.content.0.content.0.type"),
        ("user", {"type": "text"}, "messages.0.content.0.text"),
        ("user", "hi", "messages.0.content.0"),
        ("user", {"type": "document"}, "messages.0.content.0.source"),
        ("user", {"type": "document", "source": {"type": "url"}}, "messages.0.content.0.source.type"),
        ("user", {"type": "document", "source": {"type": "text"}}, "messages.0.content.0.source.data"),
        ("user", {"type": "search_result", "content": []}, "messages.0.content.0.title"),
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
