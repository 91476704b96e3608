"""POST /v1/messages and /v1/messages/count_tokens: their bodies become those of chats.

Much of what Anthropic's clients send is for Anthropic's own service: tools that it runs, edits of the context,
fallbacks. It is left out of the chat, and named once in the log and in a header of each answer.
"""

import re
import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from faser.api.bodies.chat import ChatBody
from faser.api.bodies.fields import CLOSED, LIST, OPEN, EngineFields, Flag, Integer, Number
from faser.api.bodies.openapi import BODY_ERRORS, GENERATED, answers, json_body
from faser.api.dialects.chat_requests import chat_handler, chat_prompt
from faser.api.dialects.conversion import (
    Json,
    chat_body,
    fields_of_chats,
    ignored,
    read_object,
    read_string,
    renamed_fields,
)
from faser.api.dialects.messages_answers import MessageFraming
from faser.api.dialects.messages_input import chat_messages
from faser.api.requests.service import Service
from faser.errors import RequestError
from faser.optional import given, maybe

_ASCII_NAME = re.compile(r"[\w.:/-]{1,64}", re.ASCII)

# For renamed_fields: what the fields of a chat are called here.
FIELD_NAMES = (
    (r"max_completion_tokens", "max_tokens"),
    (r"stop", "stop_sequences"),
    (r"response_format\.json_schema|response_format", "output_config.format"),
    (r"reasoning_effort", "output_config.effort"),
    (r"thinking_token_budget", "thinking.budget_tokens"),
    (r"tools\.(\d+)\.function\.parameters", r"tools.\1.input_schema"),
    (r"tools\.(\d+)\.function", r"tools.\1"),
    (r"tool_choice\.function", "tool_choice"),
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Thinking(BaseModel):
    """Settings of reasoning: whether the model reasons before it answers, and its maximum number of tokens.

    type: every one but disabled lets it reason.

    display: omitted leaves the thinking out of the answer.
    """

    model_config = OPEN

    type: str
    budget_tokens: Integer | None = None
    display: str | None = None


class OutputFormat(BaseModel):
    """schema_ is a JSON Schema."""

    model_config = CLOSED

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """effort is for the chat template."""

    model_config = OPEN

    effort: str | None = None
    format: OutputFormat | None = None


_NO_OUTPUT_CONFIG = OutputConfig()


class MessagesToolChoice(BaseModel):
    model_config = OPEN

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: Flag | None = None


class MessageFields(BaseModel):
    """Fields that the prompt is made of."""

    model_config = OPEN

    model: str | None = None
    messages: list[dict[str, Any]] = Field(fail_fast=True)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = LIST
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(MessageFields, EngineFields):
    """A request for one message."""

    max_tokens: Integer
    stop_sequences: list[str] | None = LIST
    temperature: Number | None = None
    top_p: Number | None = None
    stream: Flag | None = None
    metadata: dict[str, Any] | None = None


class CountTokensBody(MessageFields, EngineFields):
    """A prompt whose tokens are to be counted. Fields of an answer are accepted: they do not change the prompt."""


UNSUPPORTED_IN_MESSAGES = fields_of_chats(
    MessagesBody,
    {
        "stop": "stop_sequences",
        "max_completion_tokens": "max_tokens",
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
        "thinking_token_budget": "thinking.budget_tokens",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    },
)
# Fields for Anthropic's own service. They have no effect, which is said in the log and in a header of the answer.
_OF_ANTHROPIC = (
    *("billing_policy", "compaction", "container", "diagnostics", "fallback_credit_token", "fallbacks"),
    *("inference_geo", "mcp_servers", "speed", "thread", "user_profile_id", "workspace_id"),
)


def messages_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/messages", openapi_extra=json_body(MessagesBody), responses=GENERATED)
    async def create_message(http: Request) -> Response:
        body = await service.read(http, MessagesBody)
        arrival_s = time.monotonic()
        without_effect = _check(service, body)
        chat = as_chat(body)
        with renamed_fields(FIELD_NAMES):
            handler = await chat_handler(
                service, http, chat, arrival_s=arrival_s, frame=MessageFraming, shortens=True
            )
            answer = await handler.respond(http.receive)
        answer.headers.update(without_effect)
        return answer

    @router.post(
        "/v1/messages/count_tokens", openapi_extra=json_body(CountTokensBody), responses=answers(*BODY_ERRORS)
    )
    async def count_tokens(http: Request) -> Response:
        body = await service.read(http, CountTokensBody)
        without_effect = _check(service, body)
        service.model_name(body.model)
        chat = conversation(body)
        with renamed_fields(FIELD_NAMES):
            prompt = await chat_prompt(service, chat, service.engine.info)
        answer = msgspec.json.encode({"input_tokens": len(prompt.token_ids)})
        return Response(answer, media_type="application/json", headers=without_effect)

    return router


def _check(service: Service, body: MessageFields) -> dict[str, str]:
    """Check the fields that no schema declares. Return headers that name what has no effect."""
    extra = {name: value for name, value in (body.model_extra or {}).items() if name not in _OF_ANTHROPIC}
    service.fields.check(extra, UNSUPPORTED_IN_MESSAGES)
    return ignored(without_effect(body), service.fields)


def without_effect(body: MessageFields) -> dict[str, str]:
    """The kind of each part of the body that this server does not carry out, by its path, both in ASCII."""
    found: dict[str, Any] = {
        f"tools.{at}": tool["type"] for at, tool in enumerate(body.tools or ()) if _is_server_tool(tool)
    }
    edits = (body.context_management or {}).get("edits")
    for at, edit in enumerate(edits if isinstance(edits, list) else ()):
        found[f"context_management.edits.{at}"] = edit.get("type") if isinstance(edit, dict) else None
    for prefix, part in (
        ("", body),
        ("thinking.", body.thinking),
        ("output_config.", body.output_config),
        ("tool_choice.", body.tool_choice),
    ):
        extra = (part.model_extra if part is not None else None) or {}
        names = [name for name in extra if prefix or name in _OF_ANTHROPIC]
        found |= {prefix + name: "field" for name in names if extra[name] not in (None, [])}
    return {_ascii(path): _ascii(kind) for path, kind in found.items()}


def _ascii(name: Any) -> str:
    """A name that a client chose, fit for a header and a log."""
    return name if isinstance(name, str) and _ASCII_NAME.fullmatch(name) else "unknown"


def _is_server_tool(tool: Json) -> bool:
    """Return whether Anthropic defines the tool; custom and untyped tools are the client's functions."""
    return tool.get("type") not in (None, "custom")


def as_chat(body: MessagesBody) -> ChatBody:
    """Raises RequestError with the names of this dialect for what is converted, of chats for what is not."""
    if body.max_tokens < 1:
        raise RequestError(f"max_tokens is {body.max_tokens}; it must be at least 1", param="max_tokens")
    output = body.output_format or (body.output_config or _NO_OUTPUT_CONFIG).format
    return chat_body(
        {
            **_conversation(body),
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "stop": body.stop_sequences,
            "response_format": maybe(_response_format, output),
            "stream": body.stream,
        },
        body,
    )


def conversation(body: CountTokensBody) -> ChatBody:
    """A chat of which only the prompt is wanted."""
    return chat_body(_conversation(body), body)


def _conversation(body: MessageFields) -> dict[str, Any]:
    """The fields of a chat that make its prompt. Text of the assistant at the end is continued."""
    messages = chat_messages(body.messages, body.system)
    continues = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    choice, thinking, output = body.tool_choice, body.thinking, body.output_config or _NO_OUTPUT_CONFIG
    template_kwargs = dict(body.chat_template_kwargs or {})
    if thinking is not None:
        template_kwargs.setdefault("enable_thinking", thinking.type != "disabled")
    return {
        "model": body.model,
        "messages": messages,
        "continue_final_message": True if continues else None,
        "tools": maybe(_functions, body.tools),
        "tool_choice": maybe(_tool_choice, choice),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "reasoning_effort": output.effort,
        "thinking_token_budget": maybe(_budget, thinking),
        "include_reasoning": False if thinking is not None and thinking.display == "omitted" else None,
        "chat_template_kwargs": template_kwargs or None,
    }


def _response_format(output: OutputFormat) -> Json:
    schema = {"name": "schema", "schema": output.schema_, "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _budget(thinking: Thinking) -> int | None:
    return 0 if thinking.type == "disabled" else thinking.budget_tokens


def _functions(tools: Sequence[Json]) -> list[Json]:
    """Return the client's functions among the tools as chats describe them."""
    return [_tool(tool, f"tools.{at}") for at, tool in enumerate(tools) if not _is_server_tool(tool)]


def _tool(tool: Json, path: str) -> Json:
    function: Json = {
        "name": read_string(tool, "name", path),
        "parameters": read_object(tool.get("input_schema"), f"{path}.input_schema"),
    }
    function |= given({key: tool.get(key) for key in ("description", "strict")})
    return {"type": "function", "function": function}


def _tool_choice(choice: MessagesToolChoice) -> Any:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise RequestError("tool_choice.name is missing; it is required", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}
