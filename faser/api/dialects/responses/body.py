"""The body of POST /v1/responses."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from faser.api.dialects.conversion import fields_of_chats
from faser.api.protocol.common import CLOSED, LIST, EngineFields
from faser.api.protocol.scalars import Flag, Integer, Number
from faser.api.protocol.unsupported_fields import UnsupportedField

_STATELESS = "this server stores no responses; send the whole conversation as input"
_NO_OWN_TOOLS = "this server runs no tools of its own"


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


class StreamOptions(BaseModel):
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
    stream_options: StreamOptions | None = None
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
