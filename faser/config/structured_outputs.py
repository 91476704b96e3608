"""Settings of structured output, read from JSON with vLLM's keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faser.config.declaration import did_you_mean

BACKENDS = ("auto", "llguidance", "guidance")  # vLLM calls llguidance guidance
_OTHER_BACKENDS = ("xgrammar", "outlines", "lm-format-enforcer")
_IGNORED = ("disable_fallback",)  # there is one backend, so nothing falls back
_REFUSED = {
    "disable_additional_properties": "a schema holds as it is written; say additionalProperties in it",
    "reasoning_parser": "--reasoning-parser sets it",
    "reasoning_parser_plugin": "no code of the operator's runs in the server",
    "enable_in_reasoning": "a structure begins after the reasoning",
}
_KNOWN = ("backend", "disable_any_whitespace", *_IGNORED)


@dataclass(frozen=True, slots=True)
class StructuredOutputsConfig:
    """any_whitespace: JSON may have any white space between values; else a space follows each comma and colon."""

    any_whitespace: bool = False


def parse_structured_outputs(given: Mapping[str, Any] | None) -> tuple[StructuredOutputsConfig, tuple[str, ...]]:
    """The settings, and every problem of the JSON in one line each."""
    given, problems = given or {}, []
    for key, value in given.items():
        if key in _REFUSED:
            if value not in (None, False, ""):
                problems.append(f"{key} is not supported: {_REFUSED[key]}")
        elif key not in _KNOWN:
            problems.append(f"unknown key '{key}'.{did_you_mean(key, _KNOWN)} Known keys: {', '.join(_KNOWN)}")
        elif key != "backend" and not isinstance(value, bool):
            problems.append(f"{key} is {value!r}; it must be true or false")
    backend = given.get("backend", "auto")
    if backend in _OTHER_BACKENDS:
        problems.append(f"backend {backend} is not supported; llguidance is: use auto")
    elif backend not in BACKENDS:
        problems.append(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    return StructuredOutputsConfig(any_whitespace=given.get("disable_any_whitespace") is False), tuple(problems)
