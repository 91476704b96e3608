"""The JSON of --structured-outputs-config: vLLM's keys, and what is refused of them by name."""

from typing import Any

import pytest

from faser import __version__
from faser.config.engine import EngineConfig, StructuredOutputsConfig, parse_structured_outputs
from faser.errors import ConfigError

KNOWN = f"is known from vLLM but not supported by FASER {__version__}"


@pytest.mark.parametrize(
    "given, any_whitespace",
    [
        (None, False),
        ({}, False),
        ({"backend": "auto"}, False),
        ({"backend": "guidance", "disable_any_whitespace": True, "disable_fallback": True}, False),
        ({"backend": "llguidance", "disable_any_whitespace": False}, True),
        ({"reasoning_parser": "", "enable_in_reasoning": False}, False),
    ],
)
def test_what_is_understood(given: dict[str, Any] | None, any_whitespace: bool) -> None:
    assert parse_structured_outputs(given) == (StructuredOutputsConfig(any_whitespace), ())
    assert EngineConfig(structured_outputs_config=given).structured_outputs.any_whitespace is any_whitespace


@pytest.mark.parametrize(
    "given, problem",
    [
        ({"backend": "xgrammar"}, "backend is xgrammar; only llguidance is supported; use auto"),
        ({"backend": "best"}, "backend is best; it must be one of auto, llguidance, guidance"),
        ({"disable_any_whitespace": "no"}, "disable_any_whitespace is no; it must be true or false"),
        (
            {"disable_additional_properties": True},
            f"'disable_additional_properties' {KNOWN}: a schema holds",
        ),
        ({"enable_in_reasoning": True}, f"'enable_in_reasoning' {KNOWN}: a structure begins after"),
        (
            {"disable_any_whitspace": True},
            "unknown key 'disable_any_whitspace'. Did you mean 'disable_any_whitespace'?",
        ),
    ],
)
def test_what_is_refused_by_name(given: dict[str, Any], problem: str) -> None:
    _, problems = parse_structured_outputs(given)
    assert len(problems) == 1
    assert problems[0].startswith(problem)
    with pytest.raises(ConfigError, match="structured_outputs_config"):
        EngineConfig(structured_outputs_config=given)
