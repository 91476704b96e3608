"""From a StructuredOutput to the grammar that llguidance compiles: JSON text or Lark's notation.

Translates and checks the form alone; whether the grammar itself makes sense is found when it is compiled.
"""

import json
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from faser.engine.structure.structural_tags import SpecialTokens, structural_tag_grammar
from faser.errors import RequestError
from faser.types import StructuredOutput, StructureKind

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# The keys of a JSON schema that hold further schemas: one, a list of them, or one for each name.
SCHEMA_KEYS = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
SCHEMA_LIST_KEYS = ("anyOf", "oneOf", "allOf", "prefixItems")
SCHEMA_MAP_KEYS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def grammar_text(asked: StructuredOutput, *, any_whitespace: bool, special_tokens: SpecialTokens) -> str:
    """The grammar of what is asked for. any_whitespace: as in json_options. Raises RequestError."""
    match asked.kind:
        case StructureKind.JSON_OBJECT:
            return json_grammar({"type": "object"}, any_whitespace=any_whitespace)
        case StructureKind.JSON:
            return json_grammar(read_json(asked), any_whitespace=any_whitespace)
        case StructureKind.REGEX:
            return str(LLMatcher.grammar_from_lark(f"start: /{lark_regex(asked.text)}/"))
        case StructureKind.CHOICE:
            return str(LLMatcher.grammar_from_lark(_choice_grammar(asked)))
        case StructureKind.GRAMMAR:
            return str(LLMatcher.grammar_from_lark(lark_grammar(asked.text)))
        case StructureKind.STRUCTURAL_TAG:
            tree = read_json(asked)
            options = dict(json_options(any_whitespace=any_whitespace))
            return str(LLMatcher.grammar_from_lark(structural_tag_grammar(tree, options, special_tokens)))


def json_grammar(schema: Any, *, any_whitespace: bool) -> str:
    """The grammar of the JSON values that match a schema. Raises RequestError unless it is an object or true."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise RequestError(f"the JSON schema is {json.dumps(schema)[:80]}; it must be an object")
    text = json.dumps(schema)
    return str(LLMatcher.grammar_from_json_schema(text, overrides=json_options(any_whitespace=any_whitespace)))


def json_options(*, any_whitespace: bool) -> "JsonCompileOptions":
    """How llguidance writes JSON.

    any_whitespace: between values there may be any. Otherwise it is as in json.dumps: a space follows each comma
    and colon, so that the text between two values is known, and a model cannot fill its answer with blanks.
    """
    if any_whitespace:
        return {"whitespace_flexible": True}
    return {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def lark_grammar(text: str) -> str:
    """Lark's notation of a grammar in Lark's or in GBNF's notation. Raises RequestError."""
    try:
        return str(any_to_lark(text))
    except Exception as error:  # the converter raises plain exceptions for bad input
        raise RequestError(f"the grammar cannot be read: {error}") from None


def lark_regex(text: str) -> str:
    """The regular expression as it stands between slashes in Lark's notation; \\d, \\w and \\s are ASCII."""
    return str(regex_to_lark(text, "dws"))


def read_json(asked: StructuredOutput) -> Any:
    """Raises RequestError for text that is not JSON, or is nested too deeply."""
    try:
        return json.loads(asked.text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{asked.kind} is not JSON: {error}") from None


def _choice_grammar(asked: StructuredOutput) -> str:
    choices = read_json(asked)
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) for each in choices):
        raise RequestError("choice must be a list of one or more strings")
    return "start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)
