"""Parsers by name and by template."""

import pytest

from faser.api.parsing.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    choose_parsers,
    reasoning_parser_of,
    tool_parser_of,
)
from faser.config.declaration import settings_of
from faser.config.server import ServerConfig


def test_the_flags_offer_every_parser() -> None:
    choices = {each.name: each.choices for each in settings_of(ServerConfig)}
    assert set(choices["tool_call_parser"]) == {"auto", *TOOL_PARSERS}
    assert set(choices["reasoning_parser"]) == {"auto", "none", *REASONING_PARSERS}


@pytest.mark.parametrize(
    "template, name",
    [
        ("{{ messages }}", "hermes"),  # knows no tools: FASER describes them, and asks for this format
        ("{% if tools %}<tools></tools><tool_call>", "hermes"),
        ("{% if tools %}<tool_call>\n<function=name>\n<parameter=a>", "qwen3_coder"),
        ("{% if tools %}[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("{% if tools %}{{ tools }}{% endif %}<|start|>assistant<|channel|>final<|message|>", "openai"),
        ('{% if tools %}{"name": "x", "parameters": {}}{{ \'"parameters": \' }}', "llama3_json"),
        ("{% if tools %}[func_name1(params_name1=params_value1)]", "pythonic"),
        ("{% if tools %}{{ tools }}", None),
    ],
)
def test_the_template_tells_the_format_of_calls(template: str, name: str | None) -> None:
    assert tool_parser_of(template) == name


def test_the_template_tells_whether_the_model_reasons() -> None:
    assert reasoning_parser_of("{{ content.split('</think>') }}") == "qwen3"
    assert reasoning_parser_of("<|start|>assistant<|channel|>final<|message|>") == "openai_gptoss"
    assert reasoning_parser_of("{{ messages }}") is None


def test_names_overrule_the_template() -> None:
    chosen = choose_parsers(
        tool_call_parser="mistral", auto=True, reasoning_parser="none", template="<tool_call></think>{{ tools }}"
    )
    assert chosen.tool_parser is TOOL_PARSERS["mistral"]
    assert chosen.reasoning is None
    forced = choose_parsers(tool_call_parser="auto", auto=True, reasoning_parser="deepseek_r1", template="x")
    assert forced.reasoning is not None
    assert forced.reasoning.always
