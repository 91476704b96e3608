"""Structure that an answer must match: from the fields of a body to a StructuredOutput.

One request may ask in one way only, of these:

    response_format       OpenAI's and vLLM's: json_object, json_schema, structural_tag; llama.cpp's: schema
    structured_outputs    vLLM's: json, json_object, regex, choice, grammar, structural_tag
    guided_…              the same in older versions of vLLM
    grammar, json_schema  llama.cpp's

Only the form is checked here. The engine compiles the grammar before it accepts the request.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

from faser.api.bodies.body import shown
from faser.api.bodies.fields import GenerationBody, ResponseFormat, StructuredOutputsBody
from faser.errors import RequestError
from faser.optional import given
from faser.types.sampling import StructuredOutput, StructureKind

_WITHOUT_EFFECT = (None, False)


_KIND_OF_FIELD = {
    "guided_json": StructureKind.JSON,
    "guided_regex": StructureKind.REGEX,
    "guided_choice": StructureKind.CHOICE,
    "guided_grammar": StructureKind.GRAMMAR,
    "grammar": StructureKind.GRAMMAR,
    "json_schema": StructureKind.JSON,
}


def structured_output_of(body: GenerationBody) -> StructuredOutput | None:
    """None: free text. Raises RequestError for a malformed field, and where two fields ask."""
    found = [*_asked(body)]
    if len(found) > 1:
        names = " and ".join(each.param for each in found)
        raise RequestError(f"{names} are set; the answer can match only one of them", param=found[1].param)
    return found[0] if found else None


def _asked(body: GenerationBody) -> Iterator[StructuredOutput]:
    if body.response_format is not None:
        yield from _of_response_format(body.response_format)
    if body.structured_outputs is not None:
        yield from _of_structured_outputs(body.structured_outputs)
    for name, value in given({name: getattr(body, name) for name in _KIND_OF_FIELD}).items():
        yield _structure(_KIND_OF_FIELD[name], value, name)


def _of_response_format(asked: ResponseFormat) -> Iterator[StructuredOutput]:
    param, wrapper = "response_format", asked.json_schema or {}
    if asked.schema_ is not None:
        if asked.type not in ("json_object", "json_schema") or "schema" in wrapper:
            beside = f"{param}.json_schema.schema" if "schema" in wrapper else f'the type "{asked.type}"'
            raise RequestError(f"{param}.schema cannot be set beside {beside}", param=f"{param}.schema")
        yield _structure(StructureKind.JSON, asked.schema_, f"{param}.schema")
        return
    match asked.type:
        case "json_object":
            yield StructuredOutput(kind=StructureKind.JSON_OBJECT, param=param)
        case "json_schema":
            if "schema" not in wrapper:
                raise RequestError(f"{param}.json_schema.schema is missing", param=f"{param}.json_schema")
            yield _structure(StructureKind.JSON, wrapper["schema"], f"{param}.json_schema.schema")
        case "structural_tag":
            yield _structure(StructureKind.STRUCTURAL_TAG, asked.model_dump(exclude_none=True), param)


def _of_structured_outputs(asked: StructuredOutputsBody) -> Iterator[StructuredOutput]:
    for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
        if getattr(asked, name) not in _WITHOUT_EFFECT:
            raise RequestError(
                f"`structured_outputs.{name}` is not supported: --structured-outputs-config sets how JSON is "
                f"written",
                param=f"structured_outputs.{name}",
            )
    if asked.json_object:
        yield StructuredOutput(kind=StructureKind.JSON_OBJECT, param="structured_outputs.json_object")
    values = {
        StructureKind.JSON: asked.json_,
        StructureKind.REGEX: asked.regex,
        StructureKind.CHOICE: asked.choice,
        StructureKind.GRAMMAR: asked.grammar,
        StructureKind.STRUCTURAL_TAG: asked.structural_tag,
    }
    for kind, value in given(values).items():
        yield _structure(kind, value, f"structured_outputs.{kind}")


def _structure(kind: StructureKind, value: Any, param: str) -> StructuredOutput:
    return StructuredOutput(kind=kind, text=_TEXT_OF[kind](value, param), param=param)


def _schema_text(value: Any, param: str) -> str:
    """A schema, or its JSON."""
    if isinstance(value, str):
        value = _parsed(value, param)
    if not isinstance(value, dict | bool):
        raise RequestError(f"{param} is {shown(value)}; it must be a JSON schema", param=param)
    return json.dumps(value)


def _choice_text(value: Any, param: str) -> str:
    if not value:
        raise RequestError(f"{param} is an empty list; it must have at least one string", param=param)
    return json.dumps(value)


def _tag_text(value: Any, param: str) -> str:
    """Either form of structural tags, or its JSON, in the form of StructureKind.STRUCTURAL_TAG."""
    if isinstance(value, str):
        value = _parsed(value, param)
    if not isinstance(value, dict):
        raise RequestError(f"{param} is {shown(value)}; it must be an object", param=param)
    value = {key: part for key, part in value.items() if key != "type"}
    if "format" in value:
        return json.dumps(value)
    if not isinstance(value.get("structures"), list) or not isinstance(value.get("triggers"), list):
        raise RequestError(f"{param} has neither a format nor structures with triggers", param=param)
    rest = {key: part for key, part in value.items() if key != "structures"}
    return json.dumps({**rest, "tags": value["structures"]})


def _parsed(text: str, param: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{param} is not JSON: {error}", param=param) from None


def _text(value: Any, param: str) -> str:
    if not value:
        raise RequestError(f"{param} is empty; it must have at least one character", param=param)
    return str(value)


_TEXT_OF: dict[StructureKind, Callable[[Any, str], str]] = {
    StructureKind.JSON: _schema_text,
    StructureKind.REGEX: _text,
    StructureKind.CHOICE: _choice_text,
    StructureKind.GRAMMAR: _text,
    StructureKind.STRUCTURAL_TAG: _tag_text,
}
