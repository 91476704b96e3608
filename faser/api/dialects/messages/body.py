"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from faser.api.dialects.conversion import fields_of_chats
from faser.api.protocol.common import CLOSED, LIST, OPEN, EngineFields
from faser.api.protocol.scalars import Flag, Integer, Number
from faser.api.protocol.unsupported_fields import UnsupportedField

_NO_OWN_TOOLS = "this server runs no tools of its own"


class Thinking(BaseModel):
    """Whether the model reasons before it answers. budget_tokens: a hint; max_tokens bounds both together."""

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


class ToolChoice(BaseModel):
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
    tool_choice: ToolChoice | None = None
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
