"""The body of POST /v1/chat/completions, and the messages in it."""

from typing import Any

from pydantic import Field

from faser.api.protocol.body import parse_text, shown
from faser.api.protocol.common import GenerationBody
from faser.api.protocol.scalars import Flag, Integer
from faser.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")


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
    return_prompt_text: Flag | None = None
    documents: list[dict[str, Any]] | None = None


def read_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: text as a string, arguments of tool calls as objects.

    Raises RequestError that names the message and the part that is wrong.
    """
    if not messages:
        raise RequestError("messages is an empty list; it must have at least one message", param="messages")
    return [_read_message(message, f"messages.{at}") for at, message in enumerate(messages)]


def _read_message(message: dict[str, Any], path: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(
            f"{path}.role is {shown(role)}; it must be one of {', '.join(ROLES)}", param=f"{path}.role"
        )
    for key, reason in (("audio", "this model reads text only"), ("function_call", "use tool_calls")):
        if message.get(key) is not None:
            raise RequestError(f"`{path}.{key}` is not supported: {reason}", param=f"{path}.{key}")
    read = dict(message)
    calls = message.get("tool_calls")
    if calls is not None:
        read["tool_calls"] = _read_tool_calls(calls, f"{path}.tool_calls")
    if message.get("content") is None:
        if not calls:
            raise RequestError(
                f"{path}.content is missing; only a message with tool_calls may omit it", param=path
            )
        read["content"] = ""
    else:
        read["content"] = _read_content(message["content"], f"{path}.content")
    return read


def _read_content(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{path} is {shown(content)}; it must be a string or a list of text parts", param=path)
    return "\n".join(_read_part(part, f"{path}.{at}") for at, part in enumerate(content))


def _read_part(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise RequestError(f"{path}.type is {shown(kind)}; this model reads text only", param=f"{path}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{path}.text is {shown(text)}; it must be a string", param=f"{path}.text")
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
