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
from faser.engine.checkpoints.families import FAMILIES


def test_the_flags_offer_every_parser() -> None:
    choices = {each.name: each.choices for each in settings_of(ServerConfig)}
    assert set(choices["tool_call_parser"]) == {"auto", *TOOL_PARSERS}
    assert set(choices["reasoning_parser"]) == {"auto", "none", *REASONING_PARSERS}


def test_every_family_names_its_formats_of_calls_and_every_format_has_a_family() -> None:
    named = {name for family in FAMILIES for name in family.tool_parsers}
    assert named == {*TOOL_PARSERS} - {"pythonic"}  # of Llama 4, which does not load, and of tuned Llamas
    without = {family.name for family in FAMILIES if not family.tool_parsers}
    assert without == {"Gemma 2", "Gemma 3", "Mixtral", "Muse Glimmer", "OLMoE"}


@pytest.mark.parametrize(
    "template, name",
    [
        ("{{ messages }}", "hermes"),  # knows no tools: FASER describes them, and asks for this format
        ("{% if tools %}<tools></tools><tool_call>", "hermes"),
        ("{% if tools %}<tool_call>\n<function=name>\n<parameter=a>", "qwen3_coder"),
        ("{% if tools %}[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("{% if tools %}{{ tools }}{% endif %}<|start|>assistant<|channel|>final<|message|>", "openai"),
        ('{% if tools %}{"name": "x", "parameters": {}}{{ \'"parameters": \' }}', "llama3_json"),
        ("{% if tools %}List of tools: <|tool_list_start|>{{ tools }}<|tool_list_end|>", "lfm2"),
        ("{% if tools %}[func_name1(params_name1=params_value1)]", "pythonic"),
        ("{% if tools %}{{ tools }}<|tool_call>call:{{ name }}{<tool_call|><|channel>thought", "gemma4"),
        ("{% if tools %}<|system|>\n{{ tools }}{{ meta }}<|observation|>", "glm4"),
        ("{% if tools %}available_tools{{ tools }}respond with <|tool_call|> and a list", "granite"),
        ("{{ message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' }}", "phi4_mini_json"),
        ('{% if tools %}functools[{"name": x}]', "phi4_mini_json"),
        ("{% if xml_tools %}<tools></tools><tool_call>{% endif %}{% if python_tools %}<code>", "hermes"),
        ("{% if tools %}{{ tools }}", None),
    ],
)
def test_the_template_tells_the_format_of_calls(template: str, name: str | None) -> None:
    assert tool_parser_of(template) == name


def test_the_template_tells_whether_the_model_reasons() -> None:
    assert reasoning_parser_of("{{ content.split('</think>') }}") == "qwen3"
    assert reasoning_parser_of("<|start|>assistant<|channel|>final<|message|>") == "openai_gptoss"
    assert reasoning_parser_of("{{ '<|channel>thought\n' + thinking + '\n<channel|>' }}") == "gemma4"
    assert reasoning_parser_of("[THINK]{{ thinking }}[/THINK]") == "mistral"
    assert reasoning_parser_of("Write 'Here is my thought process:' first") == "granite"
    assert reasoning_parser_of("{{ messages }}") is None


@pytest.mark.parametrize("asked", ["auto", "mistral"])
def test_forced_calls_are_in_the_form_of_the_models_tokenizer(asked: str) -> None:
    """Tokenizers of Mistral from version 11 on have the name outside of the JSON."""
    begins = []
    for template in ("{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]", "{{ tools }}[TOOL_CALLS]"):
        chosen = choose_parsers(tool_call_parser=asked, auto=True, reasoning_parser="none", template=template)
        assert chosen.tool_parser.tag is not None
        begins.append(chosen.tool_parser.tag.begin("now"))
    assert begins == ["[TOOL_CALLS]now[ARGS]", '[TOOL_CALLS][{"name": "now", "arguments": ']


def test_names_overrule_the_template() -> None:
    chosen = choose_parsers(
        tool_call_parser="mistral", auto=True, reasoning_parser="none", template="<tool_call></think>{{ tools }}"
    )
    assert chosen.tool_parser is TOOL_PARSERS["mistral"]
    assert not chosen.reasoning.divides
    forced = choose_parsers(tool_call_parser="auto", auto=True, reasoning_parser="deepseek_r1", template="x")
    assert forced.reasoning.always
