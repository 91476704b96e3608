"""Which objects of a schema are closed. Oracle: texts that the compiled grammar of the closed schema allows."""

import json
from typing import Any

import pytest

from faser.api.requests.closed_schema import closed_schema
from faser.engine.structure.compiler import GrammarCompiler
from faser.types.sampling import StructuredOutput, StructureKind
from tests.engine.structure.languages import EOS, the_compiler, the_tokenizer

NUMBER = {"type": "integer"}
A = {"type": "object", "properties": {"a": NUMBER}}
B = {"type": "object", "properties": {"b": NUMBER}}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return the_compiler()


def allows(compiler: GrammarCompiler, schema: Any, value: Any) -> bool:
    asked = StructuredOutput(kind=StructureKind.JSON, text=json.dumps(schema))
    token_ids = the_tokenizer().encode(json.dumps(value))
    allowed: int = compiler.matcher(asked).validate_tokens([*token_ids, EOS])
    return allowed == len(token_ids) + 1


CLOSED: list[tuple[Any, Any, Any]] = [  # a schema, a value with declared properties alone, one with others
    (A, {"a": 1}, {"a": 1, "x": 1}),
    ({"type": "object", "properties": {}}, {}, {"x": 1}),
    ({"properties": {"o": A}}, {"o": {"a": 1}}, {"o": {"x": 1}}),
    ({"type": "array", "items": A}, [{"a": 1}], [{"x": 1}]),
    ({"type": "array", "prefixItems": [A], "items": B}, [{"a": 1}, {"b": 1}], [{"a": 1}, {"x": 1}]),
    ({"anyOf": [A, B]}, {"b": 1}, {"x": 1}),
    ({"oneOf": [{"type": "null"}, A]}, {"a": 1}, {"x": 1}),
    ({"allOf": [A], "description": "as older versions of pydantic write a reference"}, {"a": 1}, {"x": 1}),
    ({"$ref": "#/$defs/A", "$defs": {"A": A}}, {"a": 1}, {"x": 1}),
    ({"type": "object", "additionalProperties": A}, {"any": {"a": 1}}, {"any": {"x": 1}}),
    ({"type": "object", "patternProperties": {"^p": NUMBER}}, {"p1": 1}, {"x": 1}),
    ({"properties": {"properties": A}}, {"properties": {"a": 1}}, {"properties": {"x": 1}}),
    ({"properties": {"additionalProperties": NUMBER}}, {"additionalProperties": 1}, {"x": 1}),
]


@pytest.mark.parametrize("schema, declared, other", CLOSED)
def test_an_object_has_the_properties_that_it_declares(
    compiler: GrammarCompiler, schema: Any, declared: Any, other: Any
) -> None:
    given = json.dumps(schema)
    assert allows(compiler, schema, declared)
    assert allows(compiler, schema, other), "it is open as it is written"
    closed = closed_schema(schema)
    assert allows(compiler, closed, declared)
    assert not allows(compiler, closed, other)
    assert json.dumps(schema) == given


@pytest.mark.parametrize(
    "schema, other",
    [
        ({**A, "additionalProperties": True}, {"a": 1, "x": 1}),
        ({**A, "additionalProperties": {"type": "string"}}, {"a": 1, "x": "y"}),
        ({"type": "object"}, {"x": 1}),
        ({}, {"x": 1}),
        ({"properties": {"o": {"type": "object"}}}, {"o": {"x": 1}}),
        ({"allOf": [A, B]}, {"a": 1, "b": 1}),
        ({**A, "allOf": [B]}, {"a": 1, "b": 1}),
        ({**A, "anyOf": [B, {"type": "object", "required": ["a"]}]}, {"a": 1, "b": 1}),
        ({**A, "$ref": "#/$defs/B", "$defs": {"B": B}}, {"a": 1, "b": 1}),
        (
            {"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": {"A": A, "B": B}},
            {"a": 1, "b": 1},
        ),
        ({"properties": {"o": {"allOf": [A, B]}}}, {"o": {"a": 1, "b": 1}}),
        ({"properties": {"e": {"enum": [{"properties": 1}]}}}, {"e": {"properties": 1}}),
    ],
)
def test_what_a_schema_leaves_open_or_puts_together_stays_as_it_is(
    compiler: GrammarCompiler, schema: Any, other: Any
) -> None:
    assert allows(compiler, closed_schema(schema), other)


@pytest.mark.parametrize(
    "schema", [{"properties": 3}, {"anyOf": {}}, {"items": [3]}, {"allOf": None}, {"$defs": []}]
)
def test_what_is_no_schema_is_left_to_the_compiler(schema: Any) -> None:
    assert closed_schema(schema).items() >= schema.items()
