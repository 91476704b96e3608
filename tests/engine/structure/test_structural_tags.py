"""Structural tags: which texts follow each format, whole and cut into other tokens, and what is refused."""

import json
from typing import Any

import pytest

from faser.engine.structure.compiler import GrammarCompiler
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import RequestError
from faser.types.sampling import StructuredOutput, StructureKind
from tests.engine.structure.languages import EOS, the_compiler, the_tokenizer

X = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
TOOL = {"begin": "<tool=a>", "schema": X, "end": "</tool>"}
OTHER = {"begin": "<tool=b>", "schema": {"type": "boolean"}, "end": "</tool>"}
TAGS = {"triggers": ["<tool="], "tags": [TOOL, OTHER]}
A, B = '<tool=a>{"x": 12}</tool>', "<tool=b>true</tool>"


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return the_compiler()


def fmt(**fields: Any) -> dict[str, Any]:
    return {"format": fields}


def tag(content: dict[str, Any], begin: str = "<a>", end: Any = "</a>") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


DIGITS = {"type": "regex", "pattern": "[0-9]+"}
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "triggers": (
        TAGS,
        ["", "free text", A, f"before {A} after", f"{A}{B}", f"1 < 2 {B} é 🙂\n{A}\n", "<tool", "<too =a>"],
        ["<tool=c", "x <tool=a>{", A[:-1], f"{B} <tool=b>1", '<tool=a>{"y": 1}</tool>'],
    ),
    "at least one": (
        TAGS | {"at_least_one": True},
        [A, f"{B} and {A} and more"],
        ["", "free", f" {A}", f"{A}<tool=c"],
    ),
    "the first only": (
        TAGS | {"stop_after_first": True},
        ["", "free", f"so {A}"],
        [f"{A} ", f"{A}{B}", "<tool=b>"],
    ),
    "exactly one": (TAGS | {"at_least_one": True, "stop_after_first": True}, [A, B], ["", f"{A}{A}", f" {A}"]),
    "two triggers": (
        {"triggers": ["<tool=", "[call]"], "tags": [TOOL, {"begin": "[call]", "schema": {}, "end": ""}]},
        [f"{A} [call]7", "[call]null[call]{}"],
        ["[call]x"],
    ),
    "special tokens": (
        {
            "triggers": ["<|im_start|>"],
            "tags": [{"begin": "<|im_start|>call ", "schema": {"enum": [1, 2]}, "end": "."}],
        },
        ["free", "free <|im_start|>call 1. free"],
        ["<|im_start|>free", "<|im_start|>call 3."],
    ),
    "const": (fmt(type="const_string", value="the fox"), ["the fox"], ["the", "fox"]),
    "schema": (fmt(type="json_schema", json_schema={"enum": [[1, 2]]}), ["[1, 2]"], ["[1,2]", "1"]),
    "regex": (fmt(**DIGITS), ["0", "123"], ["", "a"]),
    "regex with a slash": (fmt(type="regex", pattern="a/b"), ["a/b"], ["ab"]),
    "grammar": (fmt(type="grammar", grammar='root ::= "a" | "b" root'), ["a", "bba"], ["b", ""]),
    "any text": (fmt(type="any_text"), ["", "anything\n at all <a>"], []),
    "sequence": (
        fmt(type="sequence", elements=[{"type": "const_string", "value": "n="}, DIGITS]),
        ["n=1"],
        ["n=", "1"],
    ),
    "or": (fmt(type="or", elements=[DIGITS, {"type": "const_string", "value": "x"}]), ["1", "x"], ["", "1x"]),
    "tag": (fmt(**tag(DIGITS)), ["<a>12</a>"], ["<a></a>", "12"]),
    "tag with text": (
        fmt(type="sequence", elements=[tag({"type": "any_text"}, "<think>", "</think>"), DIGITS]),
        ["<think></think>1", "<think>so\n< / </thin 1 </think>42"],
        ["1", "<think>1", "<think></think>x", "<think></think>"],
    ),
    "tag with several ends": (fmt(**tag(DIGITS, end=[";", "</a>"])), ["<a>1;", "<a>1</a>"], ["<a>1"]),
    "separator": (
        fmt(
            type="tags_with_separator",
            tags=[tag(DIGITS), tag({"type": "any_text"}, "<b>", "</b>")],
            separator=", ",
        ),
        ["", "<a>1</a>", "<a>1</a>, <b>free</b>, <a>2</a>"],
        ["<a>1</a>,<a>2</a>", "<a>1</a>, "],
    ),
    "separator, at least one": (
        fmt(
            type="tags_with_separator", tags=[tag(DIGITS)], separator="", at_least_one=True, stop_after_first=True
        ),
        ["<a>1</a>"],
        ["", "<a>1</a><a>1</a>"],
    ),
    "nested": (
        fmt(
            type="triggered_tags",
            triggers=["<a>"],
            tags=[
                tag({"type": "or", "elements": [DIGITS, {"type": "json_schema", "json_schema": {"type": "null"}}]})
            ],
        ),
        ["x<a>1</a>y<a>null</a>"],
        ["<a>x</a>"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_format_is_followed_by_its_texts_and_no_others(name: str, compiler: GrammarCompiler) -> None:
    """Each text twice: as the tokenizer divides it, and byte by byte."""
    tree, texts, others = CASES[name]
    tokenizer = the_tokenizer()
    matcher = compiler.matcher(StructuredOutput(kind=StructureKind.STRUCTURAL_TAG, text=json.dumps(tree)))
    for text in (*texts, *others):
        for token_ids in (tokenizer.encode(text), by_bytes(text, tokenizer)):
            whole = matcher.validate_tokens([*token_ids, EOS]) == len(token_ids) + 1
            assert whole is (text in texts), text


def by_bytes(text: str, tokenizer: Tokenizer) -> list[int]:
    """Special tokens stay whole."""
    single = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    found: list[int] = []
    for token_id in tokenizer.encode(text):
        if tokenizer.is_special(token_id):
            found.append(token_id)
        else:
            found += [single[bytes([byte])] for byte in tokenizer.token_bytes(token_id)]
    return found


@pytest.mark.parametrize(
    "tree, message",
    [
        (fmt(type="qwen_xml_parameter"), 'format has the type "qwen_xml_parameter"; supported: const_string,'),
        (fmt(value="x"), "format has no type"),
        (fmt(type="regex"), "format lacks the field pattern"),
        (
            fmt(type="regex", pattern="a", excludes=["b"]),
            "format.excludes is not supported in a format of type regex",
        ),
        (fmt(type="sequence", elements=[{"type": "x"}]), r"format.elements\[0\] has the type"),
        (fmt(type="sequence", elements=[]), "format.elements must be a list of one or more formats"),
        (fmt(**tag(DIGITS, begin=3)), "format.begin is 3; it must be text"),  # type: ignore[arg-type]
        (TAGS | {"triggers": ["<x"]}, r"tags\[0\].begin is '<tool=a>'; it must begin with one of the triggers"),
        (TAGS | {"triggers": [""]}, "triggers must be a list"),
        (TAGS | {"tags": []}, "tags must be a list of one or more tags"),
        (TAGS | {"tags": [1]}, r"tags\[0\] must be an object"),
        (TAGS | {"at_least_one": 1}, "at_least_one is 1; it must be true or false"),
        (TAGS | {"tags": [TOOL | {"schema": 3}]}, "json_schema is 3; it must be a JSON schema"),
        ({"format": {"type": "any_text"}, "tags": []}, "the structural tag has the field tags"),
        ([1], r"the structural tag is \[1\]; it must be an object"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tree: Any, message: str, compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError, match=message):
        compiler.matcher(StructuredOutput(kind=StructureKind.STRUCTURAL_TAG, text=json.dumps(tree)))


def test_formats_are_not_nested_without_limit(compiler: GrammarCompiler) -> None:
    tree: dict[str, Any] = DIGITS
    for _ in range(40):
        tree = {"type": "sequence", "elements": [tree]}
    with pytest.raises(RequestError, match="33 formats deep; at most 32"):
        compiler.matcher(StructuredOutput(kind=StructureKind.STRUCTURAL_TAG, text=json.dumps({"format": tree})))
