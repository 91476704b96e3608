"""Checks of compiled grammars: the limits, what is wrong with a grammar, and where a JSON schema is at fault.

Imports llguidance and nothing of FASER: trial processes load this module, and start within a tenth of a second.
"""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,  # 20 ms; numbers with `multipleOf` and schemas that must match together use none
    step_lexer_fuel=200_000,  # 15 ms
    step_max_items=20_000,  # 1 ms
    max_lexer_states=50_000,  # up to 100 MB
    max_grammar_size=50_000,
    verbose_errors=False,
)
_MOST_CHECKED = 200  # schemas within a schema that are compiled by themselves to find the faulty one
_LONGEST_REASON = 600  # characters

# The keys of a JSON schema that hold further schemas: one, a list of them, or one for each name.
_SCHEMA_KEYS = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_SCHEMA_LIST_KEYS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA_MAP_KEYS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def json_options(*, any_whitespace: bool) -> "JsonCompileOptions":
    """Return the options by which llguidance writes JSON.

    any_whitespace: between values there may be any. Otherwise it is as in json.dumps: a space follows each comma
    and colon, so that the text between two values is known, and a model cannot fill its answer with blanks.
    """
    if any_whitespace:
        return {"whitespace_flexible": True}
    return {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def schema_grammar(schema: dict[str, Any], *, any_whitespace: bool) -> str:
    """Return the grammar of the JSON values that match a schema."""
    text = json.dumps(schema)
    return str(LLMatcher.grammar_from_json_schema(text, overrides=json_options(any_whitespace=any_whitespace)))


def fault(matcher: LLMatcher) -> str | None:
    """Return why a grammar cannot be used, or None. Some faults show only after a first token.

    What the first token needs is computed here, not in a step.
    """
    if matcher.is_error():
        return _reason(matcher)
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    if matcher.is_error():
        return _reason(matcher)
    after = matcher.deep_copy()
    if mask and after.consume_token(mask.bit_length() - 1):
        after.compute_bitmask()
    return _reason(after) if after.is_error() else None


def place_of_fault(schema: Any, reason: str, tokenizer: LLTokenizer, *, any_whitespace: bool) -> str:
    """ "at /properties/a: ", the innermost schema that fails for the same reason by itself; empty at the top."""
    if not isinstance(schema, dict):
        return ""
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    path, left = "", _MOST_CHECKED
    descends = True
    while descends:
        descends = False
        for name, inner in _schemas_in(schema):
            left -= 1
            text = schema_grammar({**definitions, **inner}, any_whitespace=any_whitespace)
            error, messages = LLMatcher.validate_grammar_with_warnings(text, tokenizer, limits=LIMITS)
            if error and any(reason[:80] in each for each in messages):
                path, schema, descends = f"{path}/{name}", inner, True
                break
            if left <= 0:
                return f"at {path}: " if path else ""
    return f"at {path}: " if path else ""


def _reason(matcher: LLMatcher) -> str:
    """Return what is wrong, without the state of the parser."""
    text = str(matcher.get_error()).partition("<state>")[0].strip()
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}…"


def _schemas_in(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas directly within one, with their places."""
    for key in _SCHEMA_KEYS:
        if isinstance(schema.get(key), dict):
            yield key, schema[key]
    for key in _SCHEMA_LIST_KEYS:
        if isinstance(schema.get(key), list):
            yield from ((f"{key}/{i}", each) for i, each in enumerate(schema[key]) if isinstance(each, dict))
    for key in _SCHEMA_MAP_KEYS:
        if isinstance(schema.get(key), dict):
            yield from ((f"{key}/{name}", each) for name, each in schema[key].items() if isinstance(each, dict))
