"""Every way to ask for structure reaches the engine as one value, on both routes; two ways at once do not."""

import json
from typing import Any

import httpx
import pytest

from faser.types.sampling import StructuredOutput, StructureKind
from tests.fake_engine import FakeEngine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    TEXT: {"prompt": "hi"},
}
SCHEMA = {"type": "object", "properties": {"ä": {"type": "integer"}}}
TAG = {"begin": "<f>", "schema": SCHEMA, "end": "</f>"}
FORMAT = {"type": "tag", "begin": "<f>", "content": {"type": "any_text"}, "end": "</f>"}

ASKED: list[tuple[dict[str, Any], StructureKind, Any, str]] = [
    ({"response_format": {"type": "json_object"}}, StructureKind.JSON_OBJECT, None, "response_format"),
    *(
        (
            {"response_format": {"type": kind, "schema": SCHEMA}},
            StructureKind.JSON,
            SCHEMA,
            "response_format.schema",
        )
        for kind in ("json_object", "json_schema")
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
            }
        },
        StructureKind.JSON,
        SCHEMA,
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "structural_tag", "structures": [TAG], "triggers": ["<f"]}},
        StructureKind.STRUCTURAL_TAG,
        {"triggers": ["<f"], "tags": [TAG]},
        "response_format",
    ),
    (
        {"response_format": {"type": "structural_tag", "format": FORMAT}},
        StructureKind.STRUCTURAL_TAG,
        {"format": FORMAT},
        "response_format",
    ),
    ({"structured_outputs": {"json": SCHEMA}}, StructureKind.JSON, SCHEMA, "structured_outputs.json"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, StructureKind.JSON, SCHEMA, "structured_outputs.json"),
    (
        {"structured_outputs": {"json_object": True}},
        StructureKind.JSON_OBJECT,
        None,
        "structured_outputs.json_object",
    ),
    ({"structured_outputs": {"regex": "a+"}}, StructureKind.REGEX, "a+", "structured_outputs.regex"),
    (
        {"structured_outputs": {"choice": ["a", "é"]}},
        StructureKind.CHOICE,
        ["a", "é"],
        "structured_outputs.choice",
    ),
    (
        {"structured_outputs": {"grammar": 'root ::= "a"'}},
        StructureKind.GRAMMAR,
        'root ::= "a"',
        "structured_outputs.grammar",
    ),
    (
        {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", "format": FORMAT})}},
        StructureKind.STRUCTURAL_TAG,
        {"format": FORMAT},
        "structured_outputs.structural_tag",
    ),
    ({"guided_json": SCHEMA}, StructureKind.JSON, SCHEMA, "guided_json"),
    ({"guided_regex": "[ab]"}, StructureKind.REGEX, "[ab]", "guided_regex"),
    ({"guided_choice": ["yes", "no"]}, StructureKind.CHOICE, ["yes", "no"], "guided_choice"),
    ({"guided_grammar": 'start: "a"'}, StructureKind.GRAMMAR, 'start: "a"', "guided_grammar"),
    ({"grammar": 'root ::= "a"'}, StructureKind.GRAMMAR, 'root ::= "a"', "grammar"),
    ({"json_schema": SCHEMA}, StructureKind.JSON, SCHEMA, "json_schema"),
]


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("body, kind, value, param", ASKED)
def test_what_is_asked_for_reaches_the_engine(
    http: httpx.Client,
    engine: FakeEngine,
    route: str,
    body: dict[str, Any],
    kind: StructureKind,
    value: Any,
    param: str,
) -> None:
    answer = http.post(route, json=BODIES[route] | body)
    assert answer.status_code == 200, answer.text
    found = engine.requests[-1].sampling.structured_output
    assert isinstance(found, StructuredOutput)
    assert (found.kind, found.param) == (kind, param)
    if kind in (StructureKind.REGEX, StructureKind.GRAMMAR):
        assert found.text == value
    else:
        assert (json.loads(found.text) if found.text else None) == value


@pytest.mark.parametrize(
    "body", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}, {"guided_json": None}]
)
def test_free_text_has_no_structure(http: httpx.Client, engine: FakeEngine, body: dict[str, Any]) -> None:
    assert http.post(CHAT, json=BODIES[CHAT] | body).status_code == 200
    assert engine.requests[-1].sampling.structured_output is None


@pytest.mark.parametrize(
    "body, param, message",
    [
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex",
            "response_format and guided_regex are set; the answer can match only one of them",
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.choice",
            "structured_outputs.regex and structured_outputs.choice are set",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema is missing"),
        (
            {"response_format": {"type": "text", "schema": SCHEMA}},
            "response_format.schema",
            'response_format.schema cannot be set beside the type "text"',
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "schema": SCHEMA}},
            "response_format.schema",
            "response_format.schema cannot be set beside response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "structural_tag", "triggers": ["<f"]}},
            "response_format",
            "has neither a format nor structures with triggers",
        ),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "structured_outputs.json is not JSON"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json", "it must be a JSON schema"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "is an empty list"),
        ({"guided_regex": ""}, "guided_regex", "guided_regex is empty"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "`structured_outputs.whitespace_pattern` is not supported",
        ),
        ({"grammar": "x" * 300_000}, "grammar", "grammar has 300000 characters; at most 262144 are allowed"),
    ],
)
def test_a_malformed_structure_is_refused_by_name(
    http: httpx.Client, body: dict[str, Any], param: str, message: str
) -> None:
    answer = http.post(CHAT, json=BODIES[CHAT] | body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
