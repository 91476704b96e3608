"""Fields this build knows but cannot honour, and fields nobody knows.

Nothing is ignored silently: a known field is refused by name unless its value asks for nothing; an unknown
one is named in the log, or refused if the operator wants that.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faser.api.protocol.body import shown
from faser.errors import RequestError

_log = logging.getLogger("faser.api")

_MAX_NAMES_LOGGED = 100  # their spelling is the callers', who must not fill the log


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a field cannot be honoured. neutral: values beside null that ask for nothing."""

    reason: str
    neutral: tuple[Any, ...] = ()


_NO_GRAMMAR = "this build has no grammar engine"
_NO_TOOLS = "this build has no tool parser"
_NO_REASONING = "this build has no reasoning parser"
_TEXT_ONLY = "this model reads and writes text only"

_REFUSED = {
    "use_beam_search": Refusal("this build has no beam search", (False,)),
    "length_penalty": Refusal("this build has no beam search", (1.0, 1)),
    "early_stopping": Refusal("this build has no beam search", (False,)),
    "bad_words": Refusal("this build bans single tokens only; use logit_bias", ([],)),
    "structured_outputs": Refusal(_NO_GRAMMAR, ({},)),
    "guided_json": Refusal(_NO_GRAMMAR),
    "guided_regex": Refusal(_NO_GRAMMAR),
    "guided_choice": Refusal(_NO_GRAMMAR),
    "guided_grammar": Refusal(_NO_GRAMMAR),
    "guided_decoding_backend": Refusal(_NO_GRAMMAR),
    "guided_whitespace_pattern": Refusal(_NO_GRAMMAR),
    "spaces_between_special_tokens": Refusal("text is put together byte by byte", (True,)),
    "logits_processors": Refusal("this server runs no code from requests", ([],)),
    "prompt_embeds": Refusal("this build takes text and token ids only"),
    "kv_transfer_params": Refusal("this build moves no KV cache between servers", ({},)),
    "vllm_xargs": Refusal("this build has no custom arguments", ({},)),
    "thinking_token_budget": Refusal(_NO_REASONING),
}

REFUSED_IN_TEXT = _REFUSED | {
    "suffix": Refusal("this model has no infill template", ("",)),
}

REFUSED_IN_CHAT = _REFUSED | {
    "tools": Refusal(_NO_TOOLS, ([],)),
    "tool_choice": Refusal(_NO_TOOLS, ("none", "auto")),
    "functions": Refusal(f"it was replaced by tools, and {_NO_TOOLS}", ([],)),
    "function_call": Refusal(f"it was replaced by tool_choice, and {_NO_TOOLS}", ("none", "auto")),
    "include_reasoning": Refusal(_NO_REASONING, (True,)),
    "modalities": Refusal(_TEXT_ONLY, (["text"],)),
    "audio": Refusal(_TEXT_ONLY),
    "mm_processor_kwargs": Refusal(_TEXT_ONLY, ({},)),
    "media_io_kwargs": Refusal(_TEXT_ONLY, ({},)),
    "verbosity": Refusal("this model has no such control", ("medium",)),
    "web_search_options": Refusal("this build does not search"),
    "chat_template": Refusal("this server takes no template from requests"),
    "echo": Refusal("chat answers do not repeat the conversation", (False,)),
}

# Accepted, and documented as without effect: hints to a billing system or a cache.
HINTS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "parallel_tool_calls",
    }
)


class FieldCheck:
    """Checks fields that the body's schema does not declare. strict: refuse unknown ones."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._logged: set[str] = set()

    def check(self, extra: Mapping[str, Any] | None, refused: Mapping[str, Refusal]) -> None:
        """Raises RequestError for a field that would have to change the answer and cannot."""
        for name, value in (extra or {}).items():
            if name in HINTS:
                continue
            if name in refused:
                _check_neutral(name, value, refused[name])
            elif self._strict:
                raise RequestError(f"{name[:80]} is not a field that is known here", param=name[:80])
            else:
                self._log_once(name)

    def _log_once(self, name: str) -> None:
        if name not in self._logged and len(self._logged) < _MAX_NAMES_LOGGED:
            self._logged.add(name)
            _log.warning("requests have the unknown field %s, which has no effect", shown(name))


def _check_neutral(name: str, value: Any, refusal: Refusal) -> None:
    asks_nothing = value is None or any(
        type(value) is type(neutral) and value == neutral for neutral in refusal.neutral
    )
    if not asks_nothing:
        raise RequestError(f"`{name}` is not supported: {refusal.reason}", param=name)
