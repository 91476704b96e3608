"""POST /v1/messages and /v1/messages/count_tokens: bodies with blocks of content, which become those of chats."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from faser.api.bodies.body import shown
from faser.api.bodies.chat import ChatBody
from faser.api.bodies.fields import CLOSED, LIST, OPEN, EngineFields, Flag, Integer, Number, UnsupportedField
from faser.api.bodies.openapi import BODY_ERRORS, GENERATED, answers, json_body
from faser.api.dialects.chat_requests import chat_handler, chat_prompt
from faser.api.dialects.conversion import (
    Json,
    chat_body,
    fields_of_chats,
    read_object,
    read_string,
    read_text,
    read_texts,
    renamed_fields,
    wrong,
)
from faser.api.dialects.messages_answers import MessageFraming
from faser.api.requests.service import Service
from faser.errors import RequestError

_TEXT = ("text",)
_NO_OWN_TOOLS = "this server runs no tools of its own"

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
    """Whether the model reasons before it answers, and the most tokens of its reasoning."""

    model_config = CLOSED

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Integer | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(BaseModel):
    """schema_ is a JSON Schema."""

    model_config = CLOSED

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """effort is for the chat template."""

    model_config = CLOSED

    effort: str | None = None
    format: OutputFormat | None = None


class MessagesToolChoice(BaseModel):
    model_config = CLOSED

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: Flag | None = None


class MessageFields(BaseModel):
    """What the prompt is made of."""

    model_config = OPEN

    model: str | None = None
    messages: list[dict[str, Any]] = Field(fail_fast=True)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = LIST
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
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


UNSUPPORTED_IN_MESSAGES = {
    **fields_of_chats(
        MessagesBody,
        {
            "stop": "stop_sequences",
            "max_completion_tokens": "max_tokens",
            "response_format": "output_config.format",
            "reasoning_effort": "output_config.effort",
            "thinking_token_budget": "thinking.budget_tokens",
            "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        },
    ),
    "container": UnsupportedField(_NO_OWN_TOOLS),
    "mcp_servers": UnsupportedField(_NO_OWN_TOOLS, ([],)),
    "context_management": UnsupportedField("this server does not shorten conversations", ({},)),
    "speed": UnsupportedField("this server has one speed", ("standard",)),
    "inference_geo": UnsupportedField("this server is in one place"),
    "diagnostics": UnsupportedField("this server has no diagnostics of prompts"),
}


def messages_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/messages", openapi_extra=json_body(MessagesBody), responses=GENERATED)
    async def create_message(http: Request) -> Response:
        body = await service.read(http, MessagesBody)
        arrival_s = time.monotonic()
        service.fields.check(body.model_extra, UNSUPPORTED_IN_MESSAGES)
        chat = as_chat(body)
        with renamed_fields(FIELD_NAMES):
            handler = await chat_handler(service, http, chat, arrival_s=arrival_s, frame=MessageFraming)
            return await handler.respond(http.receive)

    @router.post(
        "/v1/messages/count_tokens", openapi_extra=json_body(CountTokensBody), responses=answers(*BODY_ERRORS)
    )
    async def count_tokens(http: Request) -> Response:
        body = await service.read(http, CountTokensBody)
        service.fields.check(body.model_extra, UNSUPPORTED_IN_MESSAGES)
        service.model_name(body.model)
        chat = conversation(body)
        with renamed_fields(FIELD_NAMES):
            prompt = await chat_prompt(service, chat, service.engine.info)
        answer = msgspec.json.encode({"input_tokens": len(prompt.token_ids)})
        return Response(answer, media_type="application/json")

    return router


def as_chat(body: MessagesBody) -> ChatBody:
    """Raises RequestError with the names of this dialect for what is converted, of chats for what is not."""
    if body.max_tokens < 1:
        raise RequestError(f"max_tokens is {body.max_tokens}; it must be at least 1", param="max_tokens")
    output = body.output_config
    schema = None if output is None or output.format is None else output.format.schema_
    response_format = {"type": "json_schema", "json_schema": {"name": "schema", "schema": schema, "strict": True}}
    return chat_body(
        {
            **_conversation(body),
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "stop": body.stop_sequences,
            "response_format": None if schema is None else response_format,
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
    choice, thinking = body.tool_choice, body.thinking
    template_kwargs = dict(body.chat_template_kwargs or {})
    if thinking is not None:
        template_kwargs.setdefault("enable_thinking", thinking.type != "disabled")
    return {
        "model": body.model,
        "messages": messages,
        "continue_final_message": True if continues else None,
        "tools": None
        if body.tools is None
        else [_tool(tool, f"tools.{at}") for at, tool in enumerate(body.tools)],
        "tool_choice": None if choice is None else _tool_choice(choice),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "reasoning_effort": None if body.output_config is None else body.output_config.effort,
        "thinking_token_budget": None if thinking is None else _budget(thinking),
        "include_reasoning": False if thinking is not None and thinking.display == "omitted" else None,
        "chat_template_kwargs": template_kwargs or None,
    }


def _budget(thinking: Thinking) -> int | None:
    return 0 if thinking.type == "disabled" else thinking.budget_tokens


def _tool(tool: Json, path: str) -> Json:
    """A function as chats describe it."""
    if tool.get("type") not in (None, "custom"):
        raise RequestError(
            f"{path}.type is {shown(tool['type'])}; it must be custom: this server knows no tools of its own",
            param=f"{path}.type",
        )
    function: Json = {
        "name": read_string(tool, "name", path),
        "parameters": read_object(tool.get("input_schema"), f"{path}.input_schema"),
    }
    function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: MessagesToolChoice) -> Any:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise RequestError("tool_choice.name is missing; it is required", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


def chat_messages(messages: Sequence[Json], system: str | list[Json] | None) -> list[Json]:
    """Messages of a chat. system: a message before all others.

    Raises RequestError that names the block, for one that is wrong or of a type that this server does not read.
    """
    if not messages:
        raise RequestError("messages is an empty list; it must have at least one message", param="messages")
    read: list[Json] = []
    if system:
        read.append({"role": "system", "content": read_texts(system, "system", _TEXT)})
    for at, message in enumerate(messages):
        path = f"messages.{at}"
        content = message.get("content")
        if content is None:
            raise RequestError(f"{path}.content is missing; it is required", param=f"{path}.content")
        match message.get("role"):
            case "user":
                read += _user(content, f"{path}.content")
            case "assistant":
                read.append(_assistant(content, f"{path}.content"))
            case "system":
                read.append({"role": "system", "content": read_texts(content, f"{path}.content", _TEXT)})
            case role:
                raise wrong(role, f"{path}.role", "user or assistant")
    return read


def _user(content: Any, path: str) -> Iterator[Json]:
    """What the user says, and a message for each result of a tool, in the order of the blocks."""
    if isinstance(content, str):
        yield {"role": "user", "content": content}
        return
    texts: list[Json] = []
    for at, block in enumerate(_blocks(content, path)):
        where = f"{path}.{at}"
        if block.get("type") != "tool_result":
            texts.append({"type": "text", "text": read_text(block, where, ("text", "tool_result"))})
            continue
        if texts:
            yield {"role": "user", "content": texts}
            texts = []
        result = block.get("content")
        yield {
            "role": "tool",
            "tool_call_id": read_string(block, "tool_use_id", where),
            "content": "" if result is None else read_texts(result, f"{where}.content", _TEXT),
        }
    if texts or not content:
        yield {"role": "user", "content": texts}


def _assistant(content: Any, path: str) -> Json:
    """One message: thinking, text and calls. Blocks of text are joined as they are, as pieces of one answer."""
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts: list[str] = []
    thinking: list[str] = []
    calls: list[Json] = []
    for at, block in enumerate(_blocks(content, path)):
        where = f"{path}.{at}"
        match block.get("type"):
            case "text":
                texts.append(read_text(block, where, _TEXT))
            case "thinking":
                thinking.append(read_string(block, "thinking", where))
            case "tool_use":
                calls.append(
                    {
                        "id": read_string(block, "id", where),
                        "type": "function",
                        "function": {
                            "name": read_string(block, "name", where),
                            "arguments": read_object(block.get("input"), f"{where}.input"),
                        },
                    }
                )
            case "redacted_thinking":
                raise RequestError(
                    f"`{where}` is not supported: only the server that redacted thinking can read it",
                    param=f"{where}.type",
                )
            case kind:
                raise RequestError(
                    f"{where}.type is {shown(kind)}; it must be text, thinking or tool_use", param=f"{where}.type"
                )
    message: Json = {"role": "assistant", "content": "".join(texts)}
    if thinking:
        message["reasoning_content"] = "".join(thinking)
    if calls:
        message["tool_calls"] = calls
    return message


def _blocks(content: Any, path: str) -> list[Json]:
    if not isinstance(content, list):
        raise wrong(content, path, "a string or a list of blocks")
    return [read_object(block, f"{path}.{at}") for at, block in enumerate(content)]
