"""The body of POST /v1/chat/completions, and the messages in it."""

from typing import Any

from pydantic import Field

from faser.api.protocol.body import parse_text, shown
from faser.api.protocol.common import GenerationBody
from faser.api.protocol.scalars import Flag, Integer
from faser.api.protocol.tools import TOOLS, Tool
from faser.errors import RequestError

_MAX_ROLE_CHARS = 64
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class ChatBody(GenerationBody):
    """The shared fields, and those of chats only."""

    messages: list[dict[str, Any]] = Field(fail_fast=True)
    max_completion_tokens: Integer | None = None
    logprobs: Flag | None = None
    top_logprobs: Integer | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    echo: Flag | None = None
    return_prompt_text: Flag | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = TOOLS
    tool_choice: Any = None
    parallel_tool_calls: Flag | None = None
    include_reasoning: Flag | None = None


def read_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: text as a string, arguments of tool calls as objects.

    Raises RequestError that names the message and the part that is wrong.
    """
    if not messages:
        raise RequestError("messages is an empty list; it must have at least one message", param="messages")
    return [_read_message(message, f"messages.{at}") for at, message in enumerate(messages)]


def _read_message(message: dict[str, Any], path: str) -> dict[str, Any]:
    role = message.get("role")
    if not (isinstance(role, str) and 1 <= len(role) <= _MAX_ROLE_CHARS):
        raise RequestError(
            f"{path}.role is {shown(role)}; it must be a string such as system, user, assistant or tool",
            param=f"{path}.role",
        )
    if message.get("audio") is not None:
        raise RequestError(f"`{path}.audio` is not supported: this model reads text only", param=f"{path}.audio")
    read = {key: value for key, value in message.items() if key != "function_call"}
    if role == "function":  # as OpenAI called it before there were tools
        read["role"] = "tool"
    calls = message.get("tool_calls")
    if calls is not None:
        read["tool_calls"] = _read_tool_calls(calls, f"{path}.tool_calls")
    elif message.get("function_call") is not None:
        call = {"type": "function", "function": message["function_call"]}
        read["tool_calls"] = [_read_tool_call(call, f"{path}.function_call")]
    content = message.get("content")
    if content is None:
        if role != "assistant":
            raise RequestError(f"{path}.content is missing; only an assistant's may be left out", param=path)
        refusal = message.get("refusal")
        read["content"] = refusal if isinstance(refusal, str) else ""
    elif isinstance(content, list):
        texts, thoughts = _read_parts(content, f"{path}.content")
        read["content"] = "\n".join(texts)
        if thoughts:
            read.setdefault("reasoning_content", "\n".join(thoughts))
    elif isinstance(content, str):
        read["content"] = content
    else:
        raise RequestError(
            f"{path}.content is {shown(content)}; it must be a string or a list of text parts",
            param=f"{path}.content",
        )
    return read


def _read_parts(parts: list[Any], path: str) -> tuple[list[str], list[str]]:
    """The texts, and the thoughts of an assistant, which templates know as reasoning_content."""
    texts: list[str] = []
    thoughts: list[str] = []
    for at, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "thinking":
            thoughts.append(_text_of(part, "thinking", f"{path}.{at}"))
        elif kind in _TEXT_PARTS:
            texts.append(_text_of(part, _TEXT_PARTS[kind], f"{path}.{at}"))
        else:
            raise RequestError(
                f"{path}.{at}.type is {shown(kind)}; this model reads text only", param=f"{path}.{at}.type"
            )
    return texts, thoughts


def _text_of(part: dict[str, Any], key: str, path: str) -> str:
    text = part.get(key)
    if not isinstance(text, str):
        raise RequestError(f"{path}.{key} is {shown(text)}; it must be a string", param=f"{path}.{key}")
    return text


def _read_tool_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    """Clients return arguments as the JSON text that they received; chat templates expect objects."""
    if not isinstance(calls, list):
        raise RequestError(f"{path} is {shown(calls)}; it must be a list", param=path)
    return [_read_tool_call(call, f"{path}.{at}") for at, call in enumerate(calls)]


def _read_tool_call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{path} is {shown(call)}; it must have a function with a name", param=path)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parse_text(arguments, f"{path}.function.arguments") if arguments else {}
    return {**call, "function": {**function, "arguments": arguments}}
