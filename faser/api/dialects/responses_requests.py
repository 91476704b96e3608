"""POST /v1/responses: OpenAI's Responses, without state. Its body becomes that of a chat.

Nothing is stored, and what needs a stored response is refused by name. A conversation comes as a list of items:
messages, function calls with their outputs, and reasoning. Reasoning, text and calls that follow each other are
one message of the assistant: chat templates write them as one turn.
"""

import time
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from faser.api.bodies.body import shown
from faser.api.bodies.chat import ChatBody
from faser.api.bodies.fields import CLOSED, LIST, EngineFields, Flag, Integer, Number, UnsupportedField
from faser.api.bodies.openapi import GENERATED, json_body
from faser.api.dialects.chat_requests import chat_handler
from faser.api.dialects.conversion import (
    Json,
    chat_body,
    fields_of_chats,
    read_object,
    read_string,
    read_texts,
    renamed_fields,
    wrong,
)
from faser.api.dialects.responses_answers import ResponseFraming
from faser.api.requests.service import Service
from faser.errors import RequestError
from faser.types import SamplingParams

_STATELESS = "this server stores no responses; send the whole conversation as input"
_NO_OWN_TOOLS = "this server runs no tools of its own"
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "refusal", "text")
_READ = "message, function_call, function_call_output and reasoning"

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


class ReasoningOptions(BaseModel):
    """effort is for the chat template. summary, generate_summary: hints; the reasoning itself is in the answer."""

    model_config = CLOSED

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(BaseModel):
    """What the answer's text must be. schema_ is a JSON Schema."""

    model_config = CLOSED

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: Flag | None = None


class TextOptions(BaseModel):
    model_config = CLOSED

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesStreamOptions(BaseModel):
    """include_obfuscation: events are sent without padding."""

    model_config = CLOSED

    include_obfuscation: Flag | None = None


class ResponsesBody(EngineFields):
    """A request for one response. Even with store true, no response can be fetched later."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Integer | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_logprobs: Integer | None = None
    include: list[str] | None = LIST
    stop: str | list[str] | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = LIST
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Flag | None = None
    max_tool_calls: Integer | None = None
    stream: Flag | None = None
    stream_options: ResponsesStreamOptions | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None


UNSUPPORTED_IN_RESPONSES = {
    **fields_of_chats(
        ResponsesBody,
        {
            "messages": "input",
            "max_tokens": "max_output_tokens",
            "max_completion_tokens": "max_output_tokens",
            "response_format": "text.format",
            "reasoning_effort": "reasoning.effort",
            "verbosity": "text.verbosity",
            "logprobs": "top_logprobs, and message.output_text.logprobs in include",
        },
    ),
    "previous_response_id": UnsupportedField(_STATELESS),
    "conversation": UnsupportedField(_STATELESS),
    "prompt": UnsupportedField("this server stores no prompts; send the text as instructions and input"),
    "background": UnsupportedField(f"a background response is fetched later, and {_STATELESS}", (False,)),
    "background_options": UnsupportedField(f"a background response is fetched later, and {_STATELESS}"),
    "context_management": UnsupportedField("this server does not shorten conversations", ([],)),
    "moderation": UnsupportedField("this server has no moderation model"),
    "image": UnsupportedField("this model reads and writes text only"),
    "access_programs": UnsupportedField(_NO_OWN_TOOLS),
}


def responses_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/responses", openapi_extra=json_body(ResponsesBody), responses=GENERATED)
    async def create_response(http: Request) -> Response:
        body = await service.read(http, ResponsesBody)
        arrival_s = time.monotonic()
        service.fields.check(body.model_extra, UNSUPPORTED_IN_RESPONSES)
        chat = as_chat(body)
        with renamed_fields(FIELD_NAMES):
            handler = await chat_handler(
                service,
                http,
                chat,
                arrival_s=arrival_s,
                frame=lambda envelope: ResponseFraming(envelope, repeated(body, envelope.sampling)),
            )
            return await handler.respond(http.receive)

    return router


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


def chat_messages(given: str | Sequence[Json], instructions: str | None) -> list[Json]:
    """Messages of a chat. instructions: a system message before all others.

    Raises RequestError that names the item, for one that is wrong or of a type that this server does not read.
    """
    turns = _Turns()
    if instructions is not None:
        turns.add({"role": "system", "content": instructions})
    if isinstance(given, str):
        turns.add({"role": "user", "content": given})
        return turns.messages
    if not given:
        raise RequestError("input is an empty list; it must have at least one item", param="input")
    for at, item in enumerate(given):
        _read_item(item, f"input.{at}", turns)
    if all(item.get("type") == "reasoning" for item in given):
        raise RequestError("input has nothing but reasoning; it must have a message to answer", param="input")
    for message in turns.messages:
        if "tool_calls" not in message:
            message.setdefault("content", "")  # a turn of reasoning only
    return turns.messages


class _Turns:
    """Messages in order; what the assistant says in succession is collected in one."""

    def __init__(self) -> None:
        self.messages: list[Json] = []

    def add(self, message: Json) -> None:
        self.messages.append(message)

    def assistant(self, key: str) -> Json:
        """The assistant's message to which key is added next: the last one, unless it is further than that."""
        later = {"reasoning_content": ("content", "tool_calls"), "content": ("tool_calls",), "tool_calls": ()}[key]
        last = self.messages[-1] if self.messages else {}
        taken = key in last and key != "tool_calls"
        if last.get("role") != "assistant" or taken or any(each in last for each in later):
            last = {"role": "assistant"}
            self.messages.append(last)
        return last


def _read_item(item: Json, path: str, turns: _Turns) -> None:
    kind = item.get("type", "message" if "role" in item else None)
    match kind:
        case "message":
            _read_message(item, path, turns)
        case "reasoning":
            if reasoning := _read_reasoning(item, path):
                turns.assistant("reasoning_content")["reasoning_content"] = reasoning
        case "function_call":
            call = {
                "id": read_string(item, "call_id", path),
                "type": "function",
                "function": {
                    "name": read_string(item, "name", path),
                    "arguments": read_string(item, "arguments", path),
                },
            }
            turns.assistant("tool_calls").setdefault("tool_calls", []).append(call)
        case "function_call_output":
            turns.add(
                {
                    "role": "tool",
                    "tool_call_id": read_string(item, "call_id", path),
                    "content": read_texts(item.get("output"), f"{path}.output", _TEXT_PARTS),
                }
            )
        case "item_reference":
            raise RequestError(
                f"{path} is an item_reference; this server stores no items, so send the item itself",
                param=f"{path}.type",
            )
        case _:
            raise RequestError(
                f"{path}.type is {shown(kind)}; this server reads items of the types {_READ}", param=f"{path}.type"
            )


def _read_message(item: Json, path: str, turns: _Turns) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise wrong(role, f"{path}.role", f"one of {', '.join(_ROLES)}")
    content = read_texts(item.get("content"), f"{path}.content", _TEXT_PARTS)
    if role == "assistant":
        turns.assistant("content")["content"] = content
    else:
        turns.add({"role": role, "content": content})


def _read_reasoning(item: Json, path: str) -> str:
    """The reasoning in words, or else its summary."""
    if item.get("encrypted_content") is not None:
        raise RequestError(
            f"`{path}.encrypted_content` is not supported: only the server that encrypted reasoning can read it",
            param=f"{path}.encrypted_content",
        )
    parts: Any = item.get("content") or item.get("summary") or []
    texts = read_texts(parts, f"{path}.content", ("reasoning_text", "summary_text", "text"))
    return texts if isinstance(texts, str) else "".join(part["text"] for part in texts)


def repeated(body: ResponsesBody, sampling: SamplingParams) -> Json:
    """The fields of a response that repeat the request, with the values in effect."""
    text, reasoning = body.text, body.reasoning
    text_format = (
        {"type": "text"}
        if text is None or text.format is None
        else text.format.model_dump(by_alias=True, exclude_none=True)
    )
    if text_format["type"] == "json_schema":
        text_format.setdefault("name", "schema")
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "text": {"format": text_format, "verbosity": None if text is None else text.verbosity},
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "tools": [_declared(tool) for tool in body.tools or ()],
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "truncation": "disabled",
        "store": False,
        "background": False,
        "previous_response_id": None,
        "service_tier": "default",
        "metadata": body.metadata or {},
        "prompt_cache_key": body.prompt_cache_key,
        "safety_identifier": body.safety_identifier,
        "user": body.user,
    }


def _declared(tool: Json) -> Json:
    """A function with every key that a response must have."""
    return {"description": None, "parameters": None, "strict": None, **tool}
