"""The fields that dialects share, how strictly JSON is read into them, and the fields that are refused.

Checks types only: other modules decide what a field means. null is the same as absent, everywhere. The parameters
of sampling are declared once, in SamplingParams: the fields of bodies are made from it.

Scalars are read as tolerantly as vLLM reads them wherever nothing is lost: a number may come as text ("5", "0.5"),
a whole number with a fraction of zero (2.0), and a truth value as 0, 1, "true" or "false". What would have to be
rounded or guessed is left as it is, for the strict check to refuse.

No field is ignored silently. An unsupported field is refused by name unless its value asks for nothing. An unknown
field is logged, or refused if the operator configures that; model_extra keeps it until then.
"""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from faser.api.bodies.body import shown
from faser.errors import RequestError
from faser.types.sampling import SamplingParams

_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?([eE][-+]?[0-9]{1,3})?")
_FLAGS = {0: False, 1: True, "0": False, "1": True, "false": False, "true": True, "False": False, "True": True}


def _as_number(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _as_integer(value: Any) -> Any:
    number = _as_number(value)
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _as_flag(value: Any) -> Any:
    return _FLAGS.get(value, value) if type(value) in (int, str) else value


Integer = Annotated[int, BeforeValidator(_as_integer)]
Number = Annotated[float, BeforeValidator(_as_number)]
Flag = Annotated[bool, BeforeValidator(_as_flag)]

# Strict: each field takes its own type, with the tolerance above; NaN and the infinities are not JSON.
OPEN = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
CLOSED = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

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
    """Limits on a request's speculation; they never change its tokens. trace: a stream says where each is from."""

    model_config = CLOSED

    enabled: Literal[True, False, "auto"] | None = None
    max_tokens: Integer | None = Field(None, ge=0)
    class_: str | None = Field(None, alias="class", min_length=1)
    slo: SloTargets | None = None
    trace: bool | None = None


class AgentHints(BaseModel):
    """Dynamo's. priority: higher is sooner. osl: tokens that the answer is expected to have.

    The other two ask for nothing where they are false, and cannot be true here.
    """

    model_config = CLOSED

    priority: Integer | None = Field(None, ge=-(2**63) + 1, lt=2**63)
    osl: Integer | None = Field(None, ge=1, le=1 << 30)
    strict_priority: Literal[False] | None = None
    speculative_prefill: Literal[False] | None = None


class NvExt(BaseModel):
    """Dynamo's extensions, of which hints are read."""

    model_config = CLOSED

    agent_hints: AgentHints | None = None


class ResponseFormat(BaseModel):
    """Constraints on an answer's text. structures, triggers: of structural_tag's older form; format: of the newer.

    schema: llama.cpp's, beside json_object or json_schema, instead of OpenAI's json_schema.schema.
    """

    model_config = CLOSED

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
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


# How JSON has the types of SamplingParams.
_JSON_TYPES: dict[Any, Any] = {
    int: Integer,
    float: Number,
    bool: Flag,
    tuple[int, ...]: list[int],
    tuple[tuple[int, float], ...]: dict[str, float],  # token ids are keys
    tuple[tuple[int, ...], ...]: list[str],  # words
}

# Parameters that dialects call differently, or do not all have.
_OF_DIALECTS = {
    *("n", "temperature", "top_p", "max_tokens", "stop"),
    *("logprobs", "prompt_logprobs", "structured_output", "thinking_budget", "pooling"),
}


def _field(kind: Any) -> tuple[Any, Any]:
    """The type and the default of the field for a parameter of this type."""
    (json_type,) = [each for known, each in _JSON_TYPES.items() if kind in (known, known | None)]
    return json_type | None, LIST if get_origin(json_type) is list else None


# Every other one is a field of all bodies, in the order of its declaration.
SAMPLING_FIELDS = {
    name: _field(kind) for name, kind in get_type_hints(SamplingParams).items() if name not in _OF_DIALECTS
}


if TYPE_CHECKING:

    class _SamplingFields(BaseModel):
        """Declares only what is read by name."""

        logit_bias: dict[str, float] | None
        bad_words: list[str] | None

else:
    _SamplingFields = create_model("_SamplingFields", __config__=OPEN, **SAMPLING_FIELDS)


class EngineFields(_SamplingFields):
    """Fields that every dialect has under the same name: what vLLM and FASER add to OpenAI's and Anthropic's.

    store: OpenAI's; false: the answer must not be recorded. service_tier: OpenAI's; the class of that name, if the
    server has one.
    """

    model_config = OPEN

    truncate_prompt_tokens: Integer | None = None
    truncation_side: Literal["left", "right"] | None = None
    request_id: str | None = None
    priority: Integer | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    store: Flag | None = None
    timeout: Number | None = None
    service_tier: str | None = None
    nvext: NvExt | None = None
    speculative: Speculative | None = None
    structured_outputs: StructuredOutputsBody | None = None


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


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


_log = logging.getLogger("faser.api")
_MAX_NAMES_LOGGED = 100  # clients choose these names and must not be able to fill the log


@dataclass(frozen=True, slots=True)
class UnsupportedField:
    """reason: why the field is not supported. neutral: values, in addition to null, that ask for nothing."""

    reason: str
    neutral: tuple[Any, ...] = ()


_TEXT_ONLY = "this model reads and writes text only"
_UNSUPPORTED = {
    "use_beam_search": UnsupportedField("there is no beam search", (False,)),
    "length_penalty": UnsupportedField("there is no beam search", (1.0, 1)),
    "early_stopping": UnsupportedField("there is no beam search", (False,)),
    "guided_decoding_backend": UnsupportedField("the only backend is llguidance", ("auto", "guidance")),
    "guided_whitespace_pattern": UnsupportedField("--structured-outputs-config sets how JSON is written"),
    "spaces_between_special_tokens": UnsupportedField("text is put together byte by byte", (True,)),
    "logits_processors": UnsupportedField("this server runs no code from requests", ([],)),
    "prompt_embeds": UnsupportedField("prompts are text or token ids"),
    "kv_transfer_params": UnsupportedField("the KV cache stays in one server", ({},)),
    "logprob_token_ids": UnsupportedField("log probabilities are those of the most likely tokens", ([],)),
    "repetition_detection": UnsupportedField("no answer is ended for repeating itself; use penalties"),
    "watermarking": UnsupportedField("answers are not watermarked", (False,)),
    "ec_transfer_params": UnsupportedField("there is no encoder cache", ({},)),
    "stream_interval": UnsupportedField("every step is sent", (1,)),
    "vllm_xargs": UnsupportedField("there are no custom arguments", ({},)),
    "lora": UnsupportedField("the adapter's name is the `model` of the request", ([],)),
}
UNSUPPORTED_IN_COMPLETIONS = _UNSUPPORTED | {
    "thinking_token_budget": UnsupportedField("completions have no reasoning; use /v1/chat/completions", (-1,)),
    "suffix": UnsupportedField("this model has no infill template", ("",)),
}
UNSUPPORTED_IN_CHATS = _UNSUPPORTED | {
    "functions": UnsupportedField("use tools, which replaced it", ([],)),
    "function_call": UnsupportedField("use tool_choice, which replaced it", ("none", "auto")),
    "modalities": UnsupportedField(_TEXT_ONLY, (["text"],)),
    "audio": UnsupportedField(_TEXT_ONLY),
    "mm_processor_kwargs": UnsupportedField(_TEXT_ONLY, ({},)),
    "media_io_kwargs": UnsupportedField(_TEXT_ONLY, ({},)),
    "web_search_options": UnsupportedField("this build does not search"),
    "chat_template": UnsupportedField("this server takes no template from requests"),
}

# Of /tokenize.
UNSUPPORTED_IN_TOKENIZE = {
    "chat_template": UNSUPPORTED_IN_CHATS["chat_template"],
    "mm_processor_kwargs": UNSUPPORTED_IN_CHATS["mm_processor_kwargs"],
    "media_io_kwargs": UNSUPPORTED_IN_CHATS["media_io_kwargs"],
}

# Accepted, and documented to have no effect: hints for billing systems and caches.
HINTS = frozenset(
    {
        "user",
        "metadata",
        "betas",
        "cache_control",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "verbosity",
        "client_metadata",  # of Codex
    }
)


class FieldChecker:
    """Checks the fields that the body's schema does not declare. strict: refuse unknown fields."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._logged: set[str] = set()

    def check(self, extra: Mapping[str, Any] | None, unsupported: Mapping[str, UnsupportedField]) -> None:
        """Raises RequestError for an unsupported field with an effect, and if strict for an unknown one."""
        for name, value in (extra or {}).items():
            if name in HINTS:
                continue
            if name in unsupported:
                _check_neutral(name, value, unsupported[name])
            elif self._strict:
                raise RequestError(f"{name[:80]} is not a known field", param=name[:80])
            else:
                self.log_ignored(f"the unknown field {shown(name)}")

    def log_ignored(self, part: str) -> None:
        """Log once that requests have this part."""
        if part not in self._logged and len(self._logged) < _MAX_NAMES_LOGGED:
            self._logged.add(part)
            _log.warning("requests have %s, which has no effect", part)


def _check_neutral(name: str, value: Any, field: UnsupportedField) -> None:
    asks_nothing = value is None or any(
        type(value) is type(neutral) and value == neutral for neutral in field.neutral
    )
    if not asks_nothing:
        raise RequestError(f"`{name}` is not supported: {field.reason}", param=name)
