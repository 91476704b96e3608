"""The structures of calls. Oracle: the compiled grammar says which texts they allow; the parsers read those."""

from dataclasses import replace
from typing import Any

import pytest

from faser.api.bodies.chat import ChatBody
from faser.api.parsing.events import collect
from faser.api.parsing.registry import NO_STYLE, REASONING_PARSERS, TOOL_PARSERS, ServerParsers
from faser.api.parsing.tool_parser import NO_CALLS
from faser.api.requests.tool_use import read_tool_use
from faser.engine.structure.compiler import GrammarCompiler
from faser.errors import RequestError
from faser.types.sampling import SamplingParams, StructuredOutput, StructureKind
from tests.engine.structure.languages import EOS, the_compiler, the_tokenizer
from tests.fake_engine import byte_tokenizer

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Bern"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
STRICT = [{"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}, TOOLS[1]]
WEATHER = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Oslo"}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]',
    "gemma4": '<|tool_call>call:weather{"city": "Oslo"}<tool_call|>',
    "granite": '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}]',
    "phi4_mini_json": '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}]<|/tool_call|>',
}
WRONG = {name: text.replace("Oslo", "Rome") for name, text in WEATHER.items()}
NOW = {name: text.replace("weather", "now").replace('"city": "Oslo"', "") for name, text in WEATHER.items()}
RULES = {"tool_choice": "required"}
ANSWER = StructuredOutput(kind=StructureKind.JSON, text='{"const": [1]}', param="response_format")


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return the_compiler()


def structure(
    fields: dict[str, Any],
    *,
    parser: str = "hermes",
    reasons: str | None = None,
    prompt: str = "",
    asked: Any = None,
) -> StructuredOutput | None:
    parsers = ServerParsers(
        tool_parser=TOOL_PARSERS[parser],
        auto=True,
        reasoning=NO_STYLE if reasons is None else REASONING_PARSERS[reasons],
    )
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **fields})
    use = read_tool_use(body, parsers, asks_structure=asked is not None)
    return use.constrain(SamplingParams(structured_output=asked), prompt, byte_tokenizer()).structured_output


def allows(compiler: GrammarCompiler, asked: StructuredOutput | None, text: str) -> bool:
    """Whether the text is a complete answer."""
    assert asked is not None
    token_ids = the_tokenizer().encode(text)
    allowed: int = compiler.matcher(asked).validate_tokens([*token_ids, EOS])
    return allowed == len(token_ids) + 1


@pytest.mark.parametrize("parser", WEATHER)
def test_demanded_calls_are_all_that_the_grammar_allows(compiler: GrammarCompiler, parser: str) -> None:
    good, wrong, now = WEATHER[parser], WRONG[parser], NOW[parser]
    required = structure(RULES, parser=parser)
    single = structure({**RULES, "parallel_tool_calls": False}, parser=parser)
    named = structure({"tool_choice": {"type": "function", "function": {"name": "now"}}}, parser=parser)
    for text, in_required, in_single, in_named in (
        (good, True, True, False),
        (now, True, True, True),
        (f"{good}\n{now}", True, False, False),
        (f"{now}\n{now}", True, False, False),
        (wrong, False, False, False),
        ("text", False, False, False),
        (f"text {good}", False, False, False),
        ("", False, False, False),
    ):
        found = tuple(allows(compiler, each, text) for each in (required, single, named))
        assert found == (in_required, in_single, in_named), text


@pytest.mark.parametrize("parser", WEATHER)
def test_what_the_grammar_allows_is_read_as_calls(parser: str) -> None:
    body = ChatBody.model_validate({"messages": [], "tools": TOOLS, **RULES})
    parsers = ServerParsers(tool_parser=TOOL_PARSERS[parser], auto=True, reasoning=NO_STYLE)
    reader = read_tool_use(body, parsers).parsing(byte_tokenizer()).start("")
    message = collect(reader.push(f"{WEATHER[parser]}\n{NOW[parser]}", (), complete=True))
    assert [(call.name, call.arguments) for call in message.tool_calls] == [
        ("weather", '{"city": "Oslo"}'),
        ("now", "{}"),
    ]
    assert message.content == ""


@pytest.mark.parametrize("parser", WEATHER)
def test_strict_functions_may_be_called_anywhere_and_only_with_matching_arguments(
    compiler: GrammarCompiler, parser: str
) -> None:
    strict = structure({"tools": STRICT}, parser=parser)
    for text, fits in (
        ("just text", True),
        (f"text {WEATHER[parser]}", True),
        (f"{NOW[parser]}\n{WEATHER[parser]}", True),
        (WRONG[parser], False),
    ):
        assert allows(compiler, strict, text) is fits, text


def test_an_answer_may_call_or_match_its_format(compiler: GrammarCompiler) -> None:
    either = structure({}, asked=ANSWER)
    assert [
        allows(compiler, either, text) for text in ("[1]", WEATHER["hermes"], "[2]", "text", WRONG["hermes"])
    ] == [True, True, False, False, False]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_demanded_call_wins_over_the_format_of_text(compiler: GrammarCompiler, choice: Any) -> None:
    call = structure({"tool_choice": choice}, asked=ANSWER)
    assert [allows(compiler, call, text) for text in ("[1]", WEATHER["hermes"], "text")] == [False, True, False]
    with pytest.raises(RequestError, match=r"structured_outputs.json sets .* only one of them"):
        structure({"tool_choice": choice}, asked=replace(ANSWER, param="structured_outputs.json"))


@pytest.mark.parametrize(
    "reasons, prompt, allowed",
    [
        ("qwen3", "", ("call", "thought")),
        ("qwen3", "<think>\n", ("thought", "within")),
        ("qwen3", "<think>\n\n</think>\n\n", ("call",)),
        ("deepseek_r1", "", ("thought", "within")),
        (None, "<think>\n", ("call",)),
    ],
)
def test_the_structure_begins_where_the_reasoning_ends(
    compiler: GrammarCompiler, reasons: str | None, prompt: str, allowed: tuple[str, ...]
) -> None:
    call = WEATHER["hermes"]
    texts = {
        "call": call,
        "thought": f"<think>\nSo: {call}?\n</think>\n\n{call}",
        "within": f"Well, [1]\n</think>\n\n{call}",
        "endless": "<think> and so on",
        "text": "<think>x</think>text",
    }
    asked = structure(RULES, reasons=reasons, prompt=prompt)
    assert tuple(name for name, text in texts.items() if allows(compiler, asked, text)) == allowed


_ANALYSIS = "<|channel|>analysis<|message|>So: [2]?<|end|><|start|>assistant"
_HARMONY_CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}'


@pytest.mark.parametrize(
    "fields, prompt, asked, allowed",
    [
        (RULES, "<|start|>assistant", None, ("call", "thought call")),
        (RULES, "<|start|>assistant", ANSWER, ("call", "thought call")),
        ({}, "<|start|>assistant", ANSWER, ("call", "thought call", "final", "thought final")),
        ({"tools": []}, "<|start|>assistant", ANSWER, ("final", "thought final")),
        ({"tools": []}, "<|start|>assistant<|channel|>final<|message|>", ANSWER, ("bare",)),
        (
            {"tools": []},
            "<|start|>assistant<|channel|>analysis<|message|>Hm, ",
            ANSWER,
            ("thought final", "within"),
        ),
    ],
)
def test_structures_follow_the_analysis_in_the_channel_that_they_belong_to(
    compiler: GrammarCompiler, fields: dict[str, Any], prompt: str, asked: Any, allowed: tuple[str, ...]
) -> None:
    final = "<|channel|>final<|message|>[1]"
    texts = {
        "call": _HARMONY_CALL,
        "thought call": _ANALYSIS + _HARMONY_CALL,
        "wrong call": _HARMONY_CALL.replace("Oslo", "Rome"),
        "final": final,
        "thought final": _ANALYSIS + final,
        "wrong final": _ANALYSIS + final.replace("1", "2"),
        "bare": "[1]",
        "within": _ANALYSIS.removeprefix("<|channel|>analysis<|message|>") + final,
        "endless": "<|channel|>analysis<|message|>So",
    }
    found = structure(fields, parser="openai", reasons="openai_gptoss", prompt=prompt, asked=asked)
    assert tuple(name for name, text in texts.items() if allows(compiler, found, text)) == allowed


def test_strict_functions_among_other_text_are_not_enforced_in_harmony() -> None:
    assert structure({"tools": STRICT}, parser="openai", reasons="openai_gptoss") is None


@pytest.mark.parametrize(
    "kind, text, fits",
    [
        (StructureKind.JSON_OBJECT, "", '{"a": 1}'),
        (StructureKind.JSON, '{"const": 5}', "5"),
        (StructureKind.REGEX, "a+b", "aab"),
        (StructureKind.GRAMMAR, 'start: "x" | "y"', "y"),
        (StructureKind.CHOICE, '["red", "blue"]', "blue"),
        (StructureKind.STRUCTURAL_TAG, '{"format": {"type": "const_string", "value": "z"}}', "z"),
        (
            StructureKind.STRUCTURAL_TAG,
            '{"triggers": ["<a"], "tags": [{"begin": "<a>", "schema": {"const": 1}, "end": "</a>"}]}',
            "<a>1</a>",
        ),
    ],
)
def test_every_kind_of_structure_can_follow_reasoning(
    compiler: GrammarCompiler, kind: StructureKind, text: str, fits: str
) -> None:
    asked = StructuredOutput(kind=kind, text=text, param="structured_outputs")
    found = structure({"tools": [], "tool_choice": None}, reasons="qwen3", prompt="<think>\n", asked=asked)
    assert found is not None
    assert found.param == "structured_outputs"
    assert allows(compiler, found, f"Hm.\n</think>\n\n{fits}")
    assert not allows(compiler, found, f"Hm.\n</think>\n\n{fits}<a>?")
    assert allows(compiler, replace(asked), fits)


def test_special_tokens_that_mark_calls_are_kept_in_the_text() -> None:
    parsers = ServerParsers(tool_parser=TOOL_PARSERS["hermes"], auto=True, reasoning=NO_STYLE)
    body = ChatBody.model_validate({"messages": [], "tools": TOOLS})
    use = read_tool_use(body, parsers)
    for special, skips in ((True, False), (False, True)):
        tokenizer = byte_tokenizer(special_tokens=("<tool_call>",) if special else ())
        assert use.constrain(SamplingParams(), "", tokenizer).skip_special_tokens is skips


def test_the_marks_of_harmony_are_kept_without_tools() -> None:
    parsers = ServerParsers(tool_parser=NO_CALLS, auto=True, reasoning=REASONING_PARSERS["openai_gptoss"])
    use = read_tool_use(ChatBody.model_validate({"messages": []}), parsers)
    tokenizer = byte_tokenizer(special_tokens=("<|message|>",))
    assert not use.constrain(SamplingParams(), "", tokenizer).skip_special_tokens
