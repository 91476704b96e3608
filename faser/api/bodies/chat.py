"""The body of a chat, which bodies of other dialects become: its messages, and the functions to be called."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from pydantic import BaseModel, Field

from faser.api.bodies.body import parse_text, shown
from faser.api.bodies.fields import OPEN, Flag, GenerationBody, Integer
from faser.errors import RequestError

MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_CHOICES = 'it must be "none", "auto", "required", or the function to call'
_MAX_ROLE_CHARS = 64
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class FunctionDefinition(BaseModel):
    """parameters: the JSON schema of the arguments. strict: arguments must match it."""

    model_config = OPEN

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """Functions are the only kind of tool."""

    model_config = OPEN

    type: Literal["function"]
    function: FunctionDefinition


TOOLS: Any = Field(None, fail_fast=True, max_length=MAX_TOOLS)


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
    thinking_token_budget: Integer | None = None
    echo: Flag | None = None
    return_prompt_text: Flag | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = TOOLS
    tool_choice: Any = None
    parallel_tool_calls: Flag | None = None
    include_reasoning: Flag | None = None


def read_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: text as a string, arguments of tool calls as objects.

    Arguments that are no JSON object stay the text that they are: a call may have been cut off, or malformed.
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
        value = parse_text(arguments or "{}", f"{path}.function.arguments")
        arguments = {} if value is None else value if isinstance(value, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


class ToolMode(Enum):
    """Modes of tool_choice: whether an answer may, must or must not call functions."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """names: of the functions that may be called. by_name: the request names the one function to call."""

    mode: ToolMode
    names: tuple[str, ...]
    by_name: bool = False


def read_tool_choice(tools: list[Tool], choice: Any) -> ToolChoice:
    """The choice among the tools of a request. choice: the body's `tool_choice`.

    Raises RequestError for tools and choices that do not fit together.
    """
    names = _names(tools)
    match choice:
        case None:
            return ToolChoice(mode=ToolMode.AUTO if names else ToolMode.NONE, names=names)
        case "none" | "auto" | "required":
            mode = ToolMode(choice)
            if mode is ToolMode.AUTO and not names:
                mode = ToolMode.NONE
            if mode is ToolMode.REQUIRED and not names:
                raise RequestError('tool_choice is "required", but no tools were given', param="tool_choice")
            return ToolChoice(mode=mode, names=names)
        case {"type": "function", "function": {"name": str(name)}}:
            _check_declared(name, names, "tool_choice.function.name")
            return ToolChoice(mode=ToolMode.REQUIRED, names=(name,), by_name=True)
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(allowed)},
        }:
            return ToolChoice(mode=ToolMode(mode), names=_allowed(allowed, names))
    raise RequestError(f"tool_choice is {shown(choice)}; {_CHOICES}", param="tool_choice")


def parameters_of(tool: Tool) -> Mapping[str, Any]:
    """The schema of a function's arguments; without one it takes none."""
    return tool.function.parameters or _NO_PARAMETERS


def _names(tools: list[Tool]) -> tuple[str, ...]:
    names: dict[str, int] = {}
    for at, tool in enumerate(tools):
        name, path = tool.function.name, f"tools.{at}.function.name"
        if not _NAME.fullmatch(name):
            raise RequestError(
                f"{path} is {shown(name)}; it must have 1 to 128 characters of A-Z a-z 0-9 _ . : / -", param=path
            )
        if name in names:
            raise RequestError(f"{path} is {name}, which tools.{names[name]} has too", param=path)
        names[name] = at
    return tuple(names)


def _allowed(entries: list[Any], names: tuple[str, ...]) -> tuple[str, ...]:
    """The functions of a choice of type allowed_tools."""
    path = "tool_choice.allowed_tools.tools"
    if not entries:
        raise RequestError(f"{path} is an empty list; it must name at least one function", param=path)
    allowed = []
    for at, entry in enumerate(entries):
        match entry:
            case {"type": "function", "function": {"name": str(name)}}:
                _check_declared(name, names, f"{path}.{at}.function.name")
                allowed.append(name)
            case _:
                raise RequestError(f"{path}.{at} is {shown(entry)}; it must be a function", param=f"{path}.{at}")
    return tuple(dict.fromkeys(allowed))


def _check_declared(name: str, names: tuple[str, ...], path: str) -> None:
    if name not in names:
        declared = ", ".join(names) or "none"
        raise RequestError(f"{path} is {shown(name)}; the functions in tools are {declared}", param=path)
