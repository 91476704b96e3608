"""200 JSON schemas that cover the keywords, made by rules and a fixed seed.

A sequence that follows one of them ends within a few hundred tokens, whatever the model: strings and lists are
bounded, and so are recursive schemas by the bounds of their lists.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

NUM_SCHEMAS = 200
_SEED = 20_604
_WORDS = (
    "amount",
    "city",
    "colour",
    "created",
    "depth",
    "email",
    "flag",
    "group",
    "height",
    "index",
    "kind",
    "level",
)
_LONG_KEYS = (
    "customer_identification_number",
    "preferred_delivery_time_window",
    "shipping_address_line_one",
    "total_amount_including_taxes",
    "is_eligible_for_express_delivery",
    "internal_reference_of_warehouse",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSchema:
    """name: of its family, with a number."""

    name: str
    schema: Json


def all_schemas() -> tuple[NamedSchema, ...]:
    """The same 200 in every call."""
    found = [
        NamedSchema(name=f"{family.__name__.lstrip('_')}-{i}", schema=schema)
        for family in _FAMILIES
        for i, schema in enumerate(family())
    ]
    rng = random.Random(_SEED)
    mixed = (NamedSchema(name=f"mixed-{i}", schema=_random(rng, depth=3)) for i in range(NUM_SCHEMAS - len(found)))
    return (*found, *mixed)


def long_keys() -> Json:
    """An object of six long keys with short values: most of its text is known beforehand."""
    return _object({key: _short_value(i) for i, key in enumerate(_LONG_KEYS)})


def _object(properties: Json, *, required: list[str] | None = None, **more: Any) -> Json:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties] if required is None else required,
        "additionalProperties": False,
        **more,
    }


def _short_value(i: int) -> Json:
    kinds: tuple[Json, ...] = (
        {"type": "integer", "minimum": 0, "maximum": 999},
        {"enum": ["morning", "afternoon", "evening"]},
        {"type": "string", "maxLength": 12},
        {"type": "boolean"},
    )
    return kinds[i % len(kinds)]


def _strings() -> Iterator[Json]:
    for low, high in ((0, 5), (1, 1), (3, 8), (10, 20), (0, 40)):
        yield {"type": "string", "minLength": low, "maxLength": high}
    yield {"type": "string", "enum": ["red", "green", "dark blue", 'a "quoted" one', "naïve – ünïcode"]}
    yield {"const": "exactly this, and nothing else"}


def _patterns() -> Iterator[Json]:
    for pattern in (
        "^[A-Z]{3}-[0-9]{4}$",
        "^(yes|no|maybe)$",
        "^[a-f0-9]{8}$",
        r"^\d{1,3}(,\d{3}){0,2}$",
        "^#[0-9A-Fa-f]{6}$",
        r"^\+?[0-9]{2,4} [0-9]{3,8}$",
        "^(ab|cd){1,4}e?$",
        r"^[\w.]{1,10}@[a-z]{2,8}\.(com|org)$",
    ):
        yield {"type": "string", "pattern": pattern}


def _formats() -> Iterator[Json]:
    for name in ("date", "time", "date-time", "uuid", "ipv4", "ipv6"):
        yield {"type": "string", "format": name}
    for name in ("email", "hostname"):
        yield _object({"value": {"type": "string", "format": name, "maxLength": 30}})


def _numbers() -> Iterator[Json]:
    for low, high in ((0, 9), (-5, 5), (100, 1000), (-1000, -990), (7, 7), (0, 2**31)):
        yield {"type": "integer", "minimum": low, "maximum": high}
    yield {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 20}
    yield {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100}
    yield {"type": "number", "minimum": 0, "maximum": 1}
    yield {"type": "number", "exclusiveMinimum": -2.5, "exclusiveMaximum": 2.5}
    yield {"type": "boolean"}
    yield {"type": "null"}
    yield {"enum": [1, 2.5, "three", None, True, {"four": 4}, [5]]}
    yield {"const": {"nested": [1, {"deep": None}], "text": "é"}}


def _arrays() -> Iterator[Json]:
    digit: Json = {"type": "integer", "minimum": 0, "maximum": 9}
    for low, high in ((0, 0), (1, 1), (0, 3), (2, 5), (6, 6)):
        yield {"type": "array", "items": digit, "minItems": low, "maxItems": high}
    yield {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "minItems": 1, "maxItems": 4}
    yield {"type": "array", "items": {"type": "boolean"}, "maxItems": 8}
    yield {"type": "array", "prefixItems": [digit, {"type": "boolean"}], "items": False, "minItems": 2}
    yield {"type": "array", "prefixItems": [{"const": "head"}], "items": digit, "minItems": 2, "maxItems": 4}
    row: Json = {"type": "array", "items": digit, "minItems": 3, "maxItems": 3}
    yield {"type": "array", "items": row, "minItems": 3, "maxItems": 3}
    yield {"type": "array", "items": _object({"x": digit, "y": digit}), "minItems": 1, "maxItems": 3}
    yield {"type": "array", "items": {"type": ["integer", "null"], "minimum": 0, "maximum": 99}, "maxItems": 5}


def _objects() -> Iterator[Json]:
    for count in range(1, 9):
        yield _object({word: _short_value(i) for i, word in enumerate(_WORDS[:count])})
    for count in (2, 4, 6):
        properties = {word: _short_value(i) for i, word in enumerate(_WORDS[:count])}
        yield _object(properties, required=[_WORDS[0]])
    yield _object({word: {"type": "boolean"} for word in _WORDS[:3]}, required=[])
    yield long_keys()
    yield _object({key: {"type": "boolean"} for key in _LONG_KEYS})
    yield _object({key: {"type": "integer", "minimum": 0, "maximum": 9} for key in _LONG_KEYS[:3]})
    yield _object({"a b": {"const": 1}, 'q"q': {"const": 2}, "ü": {"const": 3}, "": {"const": 4}})
    yield {
        "type": "object",
        "properties": {"id": {"type": "integer", "minimum": 1, "maximum": 9}},
        "patternProperties": {"^x_[a-z]{1,3}$": {"type": "boolean"}},
        "required": ["id"],
        "additionalProperties": False,
    }
    nested: Json = {"type": "boolean"}
    for depth in range(1, 6):
        nested = _object({f"level_{depth}": nested})
        yield nested


def _choices() -> Iterator[Json]:
    small: Json = {"type": "integer", "minimum": 0, "maximum": 99}
    yield {"anyOf": [{"type": "boolean"}, small]}
    yield {"anyOf": [{"type": "string", "maxLength": 6}, {"type": "null"}]}
    yield {"oneOf": [_object({"circle": small}), _object({"square": small})]}
    yield {"oneOf": [_object({"kind": {"const": "a"}, "a": small}), _object({"kind": {"const": "b"}, "b": small})]}
    yield {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]}
    yield {
        "allOf": [
            {"type": "object", "properties": {"a": small}, "required": ["a"]},
            {"type": "object", "properties": {"b": small}, "required": ["b"]},
        ],
        "additionalProperties": False,
        "properties": {"a": {}, "b": {}},
    }
    for types in (["integer", "null"], ["boolean", "integer"], ["null", "boolean"]):
        yield {"type": types, "minimum": 0, "maximum": 50}
    for count in (2, 3, 5):
        options = [_object({"type": {"const": word}, "value": _short_value(i)}) for i, word in enumerate(_WORDS)]
        yield {"type": "array", "items": {"anyOf": options[:count]}, "minItems": 1, "maxItems": 3}


def _references() -> Iterator[Json]:
    point = _object({"x": {"type": "integer", "minimum": -9, "maximum": 9}, "y": {"$ref": "#/$defs/number"}})
    definitions: Json = {"point": point, "number": {"type": "integer", "minimum": 0, "maximum": 9}}
    yield {"$ref": "#/$defs/point", "$defs": definitions}
    yield {**_object({"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}}), "$defs": definitions}
    yield {"type": "array", "items": {"$ref": "#/$defs/point"}, "minItems": 1, "maxItems": 4, "$defs": definitions}
    yield {**_object({"n": {"$ref": "#/definitions/n"}}), "definitions": {"n": {"enum": [1, 2, 3]}}}


def _recursive() -> Iterator[Json]:
    """Depth is bounded by what follows: a list that may be empty, or null."""
    number: Json = {"type": "integer", "minimum": 0, "maximum": 9}
    for most in (1, 2):
        yield {
            **_object({"value": number, "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": most}}),
        }
    yield {
        "$ref": "#/$defs/list",
        "$defs": {
            "list": _object({"head": number, "tail": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/list"}]}})
        },
    }
    operation = _object(
        {
            "op": {"enum": ["add", "multiply"]},
            "left": {"$ref": "#/$defs/expression"},
            "right": {"$ref": "#/$defs/expression"},
        }
    )
    yield {"$ref": "#/$defs/expression", "$defs": {"expression": {"anyOf": [number, operation]}}}
    yield {
        "$ref": "#/$defs/even",
        "$defs": {
            "even": _object({"odd": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/odd"}]}}),
            "odd": _object({"even": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/even"}]}}),
        },
    }


def _large() -> Iterator[Json]:
    for count in (20, 40, 80):
        yield _object({f"field_number_{i}": {"type": "boolean"} for i in range(count)})
    for count in (100, 500, 2000):
        yield {"enum": [f"item-{i * 7919 % 10_007}" for i in range(count)]}
    yield _object({f"choice_{i}": {"enum": [f"{word}_{i}" for word in _WORDS]} for i in range(20)})
    definitions = {f"type_{i}": _object({_WORDS[i % 12]: _short_value(i)}) for i in range(60)}
    yield {
        "type": "array",
        "items": {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in definitions]},
        "minItems": 1,
        "maxItems": 2,
        "$defs": definitions,
    }
    nested: Json = {"type": "boolean"}
    for i in range(30):
        nested = _object({_WORDS[i % 12]: nested})
    yield nested


def _random(rng: random.Random, *, depth: int) -> Json:
    """An object at the top, then anything, at most depth levels deep."""
    keys = rng.sample((*_WORDS, *_LONG_KEYS), rng.randint(1, 4))
    required = [key for key in keys if rng.random() < 0.8]
    return _object({key: _random_value(rng, depth - 1) for key in keys}, required=required)


def _random_value(rng: random.Random, depth: int) -> Json:
    leaves: list[Callable[[], Json]] = [
        lambda: {
            "type": "integer",
            "minimum": (low := rng.randint(-50, 50)),
            "maximum": low + rng.randint(0, 500),
        },
        lambda: {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 16)},
        lambda: {"enum": rng.sample(_WORDS, rng.randint(1, 5))},
        lambda: {"type": "boolean"},
        lambda: {"type": ["null", "boolean"]},
    ]
    branches: list[Callable[[], Json]] = [
        lambda: _random(rng, depth=depth),
        lambda: {"type": "array", "items": _random_value(rng, depth - 1), "maxItems": rng.randint(1, 3)},
        lambda: {"anyOf": [{"type": "null"}, _random(rng, depth=depth)]},
    ]
    return rng.choice(leaves if depth <= 0 else [*leaves, *branches])()


_FAMILIES: tuple[Callable[[], Iterator[Json]], ...] = (
    _strings,
    _patterns,
    _formats,
    _numbers,
    _arrays,
    _objects,
    _choices,
    _references,
    _recursive,
    _large,
)
