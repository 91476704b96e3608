"""closed_schema: the schema of a function's arguments without the properties that it does not declare.

JSON Schema lets an object have any further property, so a grammar that follows it lets a model invent arguments.
Here an object has the properties that it declares, as in OpenAI's strict mode and by default in vLLM, unless its
schema says otherwise: `additionalProperties` and `unevaluatedProperties` are kept. One that declares none is open.
"""

from collections.abc import Mapping
from typing import Any

_OF_NAMES = (
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
)  # a schema for each name
_WITHIN = ("items", "prefixItems", "additionalProperties", "unevaluatedProperties", "anyOf", "oneOf", "allOf")
_DECLARING = ("properties", "patternProperties")
_SAYING = ("additionalProperties", "unevaluatedProperties")
_BESIDE = ("anyOf", "oneOf", "$ref", "$dynamicRef", "if", "dependentSchemas")  # further schemas of the same object


class _SeveralPartsError(Exception):
    """An object is described by several schemas, none of which knows the properties of the others."""


def closed_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema as it is where some object in it is described by several schemas at once."""
    try:
        closed: Mapping[str, Any] = _closed(schema)
    except _SeveralPartsError:
        return schema
    return closed


def _closed(schema: Any) -> Any:
    """A schema, or a list of schemas; whatever else there may be stays for the compiler to refuse."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    declares = any(name in schema for name in _DECLARING)
    parts = schema.get("allOf")
    num_parts = declares + (len(parts) if isinstance(parts, list) else 0) + sum(name in schema for name in _BESIDE)
    if num_parts > 1:
        raise _SeveralPartsError
    found = dict(schema)
    for name in _OF_NAMES:
        if isinstance(named := schema.get(name), Mapping):
            found[name] = {key: _closed(each) for key, each in named.items()}
    for name in _WITHIN:
        if name in schema:
            found[name] = _closed(schema[name])
    if declares and not any(name in schema for name in _SAYING):
        found["additionalProperties"] = False
    return found
