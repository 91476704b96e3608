"""Values that a model writes as bare text: the function's schema says whether one is a string or JSON."""

import json
from collections.abc import Iterable
from typing import Any

from faser.api.parsing.json_formats import as_json
from faser.api.parsing.pythonic import literal_value
from faser.api.parsing.tool_parser import Schema

_MAX_REFERENCES = 8
ANY_BUT_STRING = {"boolean", "integer", "number", "null", "array", "object"}


def as_typed_json(text: str, types: set[str]) -> str:
    """Return a value as JSON: of one of the types if it can be read so, else a string."""
    for read in (json.loads, literal_value):  # models write Python's True, None and quotes too
        try:
            value = read(text.strip())
            if isinstance(value, float) and value.is_integer() and "number" not in types:
                value = int(value)
            if not isinstance(value, str) and _type_of(value) & types:
                return as_json(value)
        except (ValueError, RecursionError):
            continue
    return as_json(text)


def _type_of(value: Any) -> set[str]:
    """JSON Schema's names for the type of a value."""
    match value:
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case str():
            return {"string"}
        case None:
            return {"null"}
        case list():
            return {"array"}
        case dict():
            return {"object"}
    return set()


def member_of(schema: Any, key: str | None, root: Schema) -> Any:
    """Return the schema of one property, or of the items of a list if key is None; None: there is none."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        schema = _referenced(schema["$ref"], root)
    if not isinstance(schema, dict):
        return None
    properties = schema.get("properties")
    if key is None:
        return schema.get("items")
    return properties.get(key) if isinstance(properties, dict) else None


def types_of(schema: Any, root: Schema, depth: int = 0) -> set[str]:
    """Return the types that a schema allows, as far as it names them; empty: it names none."""
    if not isinstance(schema, dict) or depth > _MAX_REFERENCES:
        return set()
    found = set(_strings(schema.get("type")))
    if not found:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        found.update(*map(_type_of, values if isinstance(values, list) else ()))
    for key in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(key)
        for branch in branches if isinstance(branches, list) else ():
            found |= types_of(branch, root, depth + 1)
    if "$ref" in schema:
        found |= types_of(_referenced(schema["$ref"], root), root, depth + 1)
    return found


def _strings(value: Any) -> Iterable[str]:
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, str)]


def _referenced(reference: Any, root: Any) -> Any:
    """Return the part of the schema that a reference points to; None: there is none."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    for part in reference.removeprefix("#/").split("/"):
        if not isinstance(root, dict):
            return None
        root = root.get(part.replace("~1", "/").replace("~0", "~"))
    return root
