"""The fields that chats and completions share, and how strictly JSON is read into them.

Checks types only: other modules decide what a field means and whether it is supported. null is the same as
absent, everywhere. Unknown fields are kept in model_extra.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from faser.api.protocol.scalars import Flag, Integer, Number

# Strict: each field takes its own type, with the tolerance of scalars.py; NaN and the infinities are not JSON.
OPEN = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
CLOSED = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


# fail_fast: report the first of a million wrong elements, not all of them.
LIST: Any = Field(None, fail_fast=True)


class StreamOptions(BaseModel):
    """continuous_usage_stats: every chunk has the counts so far."""

    model_config = CLOSED

    include_usage: Flag | None = None
    continuous_usage_stats: Flag | None = None
    include_obfuscation: Flag | None = None


class SloTargets(BaseModel):
    """Latency targets, in milliseconds."""

    model_config = CLOSED

    ttft_ms: Number | None = Field(None, gt=0)
    tpot_ms: Number | None = Field(None, gt=0)


class Speculative(BaseModel):
    """How much speculation a request allows. Never changes its tokens. trace: a stream says where each is from."""

    model_config = CLOSED

    enabled: Literal[True, False, "auto"] | None = None
    max_tokens: Integer | None = Field(None, ge=0)
    class_: str | None = Field(None, alias="class", min_length=1)
    slo: SloTargets | None = None
    trace: bool | None = None


class ResponseFormat(BaseModel):
    """What the answer must be. structures, triggers: of the older form of structural_tag; format: of the newer."""

    model_config = CLOSED

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = None
    structures: list[Any] | None = None
    triggers: list[Any] | None = None
    format: dict[str, Any] | None = None


class StructuredOutputsBody(BaseModel):
    """vLLM's field: what the answer must match. Exactly one of the first six."""

    model_config = CLOSED

    json_: dict[str, Any] | str | bool | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = LIST
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class PredictedPart(BaseModel):
    model_config = CLOSED

    type: Literal["text"]
    text: str


class Prediction(BaseModel):
    """OpenAI's predicted output: text that the answer may repeat in large parts."""

    model_config = CLOSED

    type: Literal["content"]
    content: str | list[PredictedPart]


class EngineFields(BaseModel):
    """Fields that every dialect has under the same name: what vLLM and FASER add to OpenAI's and Anthropic's.

    store: OpenAI's; false: the answer must not be recorded.
    """

    model_config = OPEN

    min_tokens: Integer | None = None
    top_k: Integer | None = None
    min_p: Number | None = None
    seed: Integer | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = LIST
    bad_words: list[str] | None = LIST
    stop_token_ids: list[int] | None = LIST
    include_stop_str_in_output: Flag | None = None
    ignore_eos: Flag | None = None
    skip_special_tokens: Flag | None = None
    truncate_prompt_tokens: Integer | None = None
    truncation_side: Literal["left", "right"] | None = None
    request_id: str | None = None
    priority: Integer | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    store: Flag | None = None
    timeout: Number | None = None
    speculative: Speculative | None = None
    structured_outputs: StructuredOutputsBody | None = None


class GenerationBody(EngineFields):
    """The body of both generation routes."""

    model: str | None = None
    n: Integer | None = None
    best_of: Integer | None = None
    max_tokens: Integer | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_as_list)] = LIST
    prompt_logprobs: Integer | None = None
    add_special_tokens: Flag | None = None
    return_token_ids: Flag | None = None
    return_tokens_as_token_ids: Flag | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = LIST
    guided_grammar: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    prediction: Prediction | None = None
