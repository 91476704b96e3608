"""The body of POST /v1/responses, OpenAI's Responses. It becomes that of a chat, and the answer repeats it."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from faser.api.bodies.chat import ChatBody
from faser.api.bodies.fields import CLOSED, LIST, EngineFields, Flag, Integer, Number, UnsupportedField
from faser.api.dialects.conversion import (
    Json,
    chat_body,
    fields_of_chats,
    wrong,
)
from faser.api.dialects.responses_input import chat_messages
from faser.api.dialects.responses_tools import ResponseTools
from faser.errors import RequestError
from faser.optional import given, maybe, or_else
from faser.types.sampling import SamplingParams

_NO_CONVERSATIONS = "this server stores no conversations; send the whole conversation as input"
_IN_BACKGROUND = "this server answers the client that waits; it stores no responses that are still being made"
_NO_OWN_TOOLS = "this server runs no tools of its own"

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
    """Required format of the answer's text. schema_ is a JSON Schema."""

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


_NO_TEXT_OPTIONS, _NO_REASONING_OPTIONS, _PLAIN_TEXT = (
    TextOptions(),
    ReasoningOptions(),
    TextFormat(type="text", schema=None),
)


class ResponsesStreamOptions(BaseModel):
    """include_obfuscation: events are sent without padding."""

    model_config = CLOSED

    include_obfuscation: Flag | None = None


class ResponsesBody(EngineFields):
    """A request for one response. previous_response_id: of one that was kept, whose conversation it continues."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
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
    truncation: Literal["auto", "disabled"] | None = None
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
    "conversation": UnsupportedField(_NO_CONVERSATIONS),
    "prompt": UnsupportedField("this server stores no prompts; send the text as instructions and input"),
    "background": UnsupportedField(_IN_BACKGROUND, (False,)),
    "background_options": UnsupportedField(_IN_BACKGROUND),
    "context_management": UnsupportedField("this server does not shorten conversations", ([],)),
    "moderation": UnsupportedField("this server has no moderation model"),
    "image": UnsupportedField("this model reads and writes text only"),
    "access_programs": UnsupportedField(_NO_OWN_TOOLS),
}


def as_chat(body: ResponsesBody, tools: ResponseTools, before: Sequence[Json] = ()) -> ChatBody:
    """The body of the chat. before: items of the conversation that it continues.

    Raises RequestError with the names of this dialect for what is converted, of chats for what is not.
    """
    if unknown := [each for each in body.include or () if each not in _INCLUDABLE]:
        raise wrong(unknown[0], "include", f"among {', '.join(sorted(_INCLUDABLE))}")
    choice, functions = tools.choice(body.tool_choice)
    text, reasoning = body.text or _NO_TEXT_OPTIONS, body.reasoning or _NO_REASONING_OPTIONS
    asks_logprobs = bool(body.top_logprobs) or _LOGPROBS in (body.include or ())
    return chat_body(
        {
            "model": body.model,
            "messages": chat_messages(body.input, body.instructions, before),
            "max_completion_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "logprobs": True if asks_logprobs else None,
            "top_logprobs": body.top_logprobs,
            "stop": body.stop,
            "response_format": maybe(_response_format, text.format),
            "verbosity": text.verbosity,
            "reasoning_effort": reasoning.effort,
            "tools": functions or None,
            "tool_choice": choice,
            "parallel_tool_calls": body.parallel_tool_calls,
            "chat_template_kwargs": body.chat_template_kwargs,
            "stream": body.stream,
        },
        body,
    )


def _response_format(asked: TextFormat) -> Json:
    if asked.type != "json_schema":
        return {"type": asked.type}
    if asked.schema_ is None:
        raise RequestError("text.format.schema is missing; it is required", param="text.format.schema")
    schema = {
        "name": asked.name or "schema",
        "description": asked.description,
        "schema": asked.schema_,
        "strict": asked.strict,
    }
    return {"type": "json_schema", "json_schema": given(schema)}


def repeated(body: ResponsesBody, sampling: SamplingParams, *, stored: bool = False) -> Json:
    """The fields of a response that repeat the request, with the values in effect."""
    text, reasoning = body.text or _NO_TEXT_OPTIONS, body.reasoning or _NO_REASONING_OPTIONS
    text_format = (text.format or _PLAIN_TEXT).model_dump(by_alias=True, exclude_none=True)
    if text_format["type"] == "json_schema":
        text_format = {"name": "schema", "description": None, "strict": False, **text_format}
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "text": {"format": text_format, **given({"verbosity": text.verbosity})},
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "tools": [_declared(tool) for tool in body.tools or ()],
        "tool_choice": or_else(body.tool_choice, "auto"),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "truncation": body.truncation or "disabled",
        "store": stored,
        "background": False,
        "previous_response_id": body.previous_response_id,
        "service_tier": "default",
        "metadata": body.metadata or {},
        "prompt_cache_key": body.prompt_cache_key,
        "safety_identifier": body.safety_identifier,
        "user": body.user,
    }


def _declared(tool: Json) -> Json:
    """A tool as the request has it; a function with every key that a response must have."""
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": None, **tool}
