"""The body of a response as the body of a chat: a pure function, and the names of fields for errors."""

from typing import Any

from faser.api.dialects.conversion import Json, chat_body, read_object, read_string, wrong
from faser.api.dialects.responses.body import ResponsesBody, TextFormat
from faser.api.dialects.responses.input_items import chat_messages
from faser.api.protocol.body import shown
from faser.api.protocol.chat import ChatBody
from faser.errors import RequestError

# For renamed_fields: what the fields of a chat are called here.
FIELD_NAMES = (
    (r"messages", "input"),
    (r"max_completion_tokens|max_tokens", "max_output_tokens"),
    (r"response_format\.json_schema", "text.format"),
    (r"response_format", "text.format"),
    (r"reasoning_effort", "reasoning.effort"),
    (r"verbosity", "text.verbosity"),
    (r"tools\.(\d+)\.function", r"tools.\1"),
    (r"tool_choice\.function", "tool_choice"),
)

_LOGPROBS = "message.output_text.logprobs"

# What a response may include. The results of tools that this server does not have are never there.
_INCLUDABLE = frozenset(
    {
        _LOGPROBS,
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "message.input_image.image_url",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)


def as_chat(body: ResponsesBody) -> ChatBody:
    """Raises RequestError with the names of this dialect for what is converted, of chats for what is not."""
    if body.truncation not in (None, "disabled"):
        raise RequestError(
            f"truncation is {shown(body.truncation)}; it must be disabled: this server does not shorten inputs",
            param="truncation",
        )
    if unknown := [each for each in body.include or () if each not in _INCLUDABLE]:
        raise wrong(unknown[0], "include", f"among {', '.join(sorted(_INCLUDABLE))}")
    tools = None if body.tools is None else [_tool(tool, f"tools.{at}") for at, tool in enumerate(body.tools)]
    choice, tools = _tool_choice(body.tool_choice, tools)
    text = body.text
    asks_logprobs = bool(body.top_logprobs) or _LOGPROBS in (body.include or ())
    return chat_body(
        {
            "model": body.model,
            "messages": chat_messages(body.input, body.instructions),
            "max_completion_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "logprobs": True if asks_logprobs else None,
            "top_logprobs": body.top_logprobs,
            "stop": body.stop,
            "response_format": None if text is None or text.format is None else _response_format(text.format),
            "verbosity": None if text is None else text.verbosity,
            "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
            "tools": tools,
            "tool_choice": choice,
            "parallel_tool_calls": body.parallel_tool_calls,
            "chat_template_kwargs": body.chat_template_kwargs,
            "stream": body.stream,
        },
        body,
    )


def _tool(tool: Json, path: str) -> Json:
    """A function as chats describe it. Functions are flat here."""
    if tool.get("type") != "function":
        raise RequestError(
            f"{path}.type is {shown(tool.get('type'))}; it must be function: this server runs no tools of its own",
            param=f"{path}.type",
        )
    keys = ("name", "description", "parameters", "strict")
    return {
        "type": "function",
        "function": {key: tool[key] for key in keys if tool.get(key) is not None},
    }


def _tool_choice(choice: Any, tools: list[Json] | None) -> tuple[Any, list[Json] | None]:
    """(choice as chats have it, the tools that may be called)."""
    if choice is None or isinstance(choice, str):
        return choice, tools
    match choice.get("type"):
        case "function":
            return {"type": "function", "function": {"name": read_string(choice, "name", "tool_choice")}}, tools
        case "allowed_tools":
            return choice.get("mode", "auto"), _allowed(choice, tools or [])
    raise wrong(choice.get("type"), "tool_choice.type", "function or allowed_tools")


def _allowed(choice: Json, tools: list[Json]) -> list[Json]:
    given = choice.get("tools")
    if not isinstance(given, list):
        raise wrong(given, "tool_choice.tools", "a list of functions")
    by_name = {tool["function"].get("name"): tool for tool in tools}
    allowed = []
    for at, each in enumerate(given):
        path = f"tool_choice.tools.{at}"
        name = read_string(read_object(each, path), "name", path)
        if name not in by_name:
            raise wrong(name, f"{path}.name", "the name of one of tools")
        allowed.append(by_name[name])
    return allowed


def _response_format(given: TextFormat) -> Json:
    if given.type != "json_schema":
        return {"type": given.type}
    if given.schema_ is None:
        raise RequestError("text.format.schema is missing; it is required", param="text.format.schema")
    schema = {
        "name": given.name or "schema",
        "description": given.description,
        "schema": given.schema_,
        "strict": given.strict,
    }
    return {
        "type": "json_schema",
        "json_schema": {key: value for key, value in schema.items() if value is not None},
    }
