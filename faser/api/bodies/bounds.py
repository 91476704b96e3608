"""bounds: limits of fields that are enforced after a body has been read, as JSON Schema writes them.

SamplingParams, requests and routes enforce them, with messages that name the value and the limit; /openapi.json
says them in advance. A field means the same wherever a body has it, so they go by name.
"""

from typing import Any

from faser.types.sampling import (
    BIAS_LIMITS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_STRUCTURE_CHARS,
    PRIORITY_LIMITS,
    SAMPLING_LIMITS,
    Limits,
)

Json = dict[str, Any]
MAX_ID_LENGTH = 256


def bounds(max_logprobs: int) -> dict[str, Json]:
    """Return the JSON Schema limits of fields, by field name. max_logprobs: the operator's."""
    one_or_more, text = {"minimum": 1}, {"minLength": 1, "maxLength": MAX_STRUCTURE_CHARS}
    words = {"minLength": 1, "maxLength": MAX_STOP_CHARS}
    stop, alternatives = {"maxItems": MAX_STOP_STRINGS, "items": words}, {"minimum": 0, "maximum": max_logprobs}
    return {
        **{name: _number(limits) for name, limits in SAMPLING_LIMITS.items()},
        "top_k": {**_number(SAMPLING_LIMITS["top_k"]), "minimum": -1},
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), one_or_more),
        **dict.fromkeys(("logprobs", "prompt_logprobs", "top_logprobs"), alternatives),
        **dict.fromkeys(("stop", "stop_sequences"), stop),
        **dict.fromkeys(("guided_regex", "guided_grammar", "grammar"), text),
        "guided_choice": {"minItems": 1},
        "stop_token_ids": {"maxItems": MAX_STOP_TOKEN_IDS},
        "allowed_token_ids": {"minItems": 1},
        "bad_words": {"maxItems": MAX_BAD_WORDS, "items": {**words, "pattern": r"\S"}},
        "logit_bias": {"maxProperties": MAX_LOGIT_BIAS, "additionalProperties": _number(BIAS_LIMITS)},
        "truncate_prompt_tokens": {"minimum": -1, "not": {"const": 0}},
        "priority": _number(PRIORITY_LIMITS),
        "thinking_token_budget": {"minimum": -1},
        "timeout": {"exclusiveMinimum": 0},
        "request_id": {"minLength": 1, "maxLength": MAX_ID_LENGTH},
    }


def _number(limits: Limits) -> Json:
    low = "exclusiveMinimum" if limits.above else "minimum"
    return {low: limits.low} if limits.high is None else {low: limits.low, "maximum": limits.high}
