"""Body fields that FASER knows but does not support, and fields that it does not know.

No field is ignored silently. An unsupported field is refused by name unless its value asks for nothing. An
unknown field is logged, or refused if the operator configures that.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faser.api.protocol.body import shown
from faser.errors import RequestError

_log = logging.getLogger("faser.api")

_MAX_NAMES_LOGGED = 100  # clients choose these names and must not be able to fill the log


@dataclass(frozen=True, slots=True)
class UnsupportedField:
    """reason: why the field is not supported. neutral: values, in addition to null, that ask for nothing."""

    reason: str
    neutral: tuple[Any, ...] = ()


_TEXT_ONLY = "this model reads and writes text only"

_UNSUPPORTED = {
    "use_beam_search": UnsupportedField("this build has no beam search", (False,)),
    "length_penalty": UnsupportedField("this build has no beam search", (1.0, 1)),
    "early_stopping": UnsupportedField("this build has no beam search", (False,)),
    "guided_decoding_backend": UnsupportedField("llguidance alone is built in", ("auto", "guidance")),
    "guided_whitespace_pattern": UnsupportedField("--structured-outputs-config sets how JSON is written"),
    "spaces_between_special_tokens": UnsupportedField("text is put together byte by byte", (True,)),
    "logits_processors": UnsupportedField("this server runs no code from requests", ([],)),
    "prompt_embeds": UnsupportedField("this build takes text and token ids only"),
    "kv_transfer_params": UnsupportedField("this build moves no KV cache between servers", ({},)),
    "logprob_token_ids": UnsupportedField("log probabilities are those of the likeliest tokens", ([],)),
    "repetition_detection": UnsupportedField("no answer is ended for repeating itself; use penalties"),
    "watermarking": UnsupportedField("this build marks no answers", (False,)),
    "ec_transfer_params": UnsupportedField("this build has no encoder cache", ({},)),
    "stream_interval": UnsupportedField("every step is sent", (1,)),
    "vllm_xargs": UnsupportedField("this build has no custom arguments", ({},)),
    "thinking_token_budget": UnsupportedField("reasoning ends where the model ends it; use max_tokens"),
}

UNSUPPORTED_IN_COMPLETIONS = _UNSUPPORTED | {
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
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "verbosity",
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
                self._log_once(name)

    def _log_once(self, name: str) -> None:
        if name not in self._logged and len(self._logged) < _MAX_NAMES_LOGGED:
            self._logged.add(name)
            _log.warning("requests have the unknown field %s, which has no effect", shown(name))


def _check_neutral(name: str, value: Any, field: UnsupportedField) -> None:
    asks_nothing = value is None or any(
        type(value) is type(neutral) and value == neutral for neutral in field.neutral
    )
    if not asks_nothing:
        raise RequestError(f"`{name}` is not supported: {field.reason}", param=name)
