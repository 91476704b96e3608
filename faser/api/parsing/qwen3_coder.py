"""<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>: Qwen3-Coder.

A value is bare text; the function's schema says whether it is a string or JSON.
"""

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from faser.api.parsing.json_formats import as_json, read_call
from faser.api.parsing.pythonic import literal_value
from faser.api.parsing.text_cursor import Reading, TextCursor
from faser.api.parsing.tool_parser import CallTag, CallWriter, NotACall, Schema, openai_call_id, read_word

_PLAIN = re.compile(r"[^<\n]+")
_MAX_REFERENCES = 8


class Qwen3CoderParser:
    """The outer tag may be missing. Within it, a call in Hermes's JSON is read as well: models write both."""

    marks: ClassVar[tuple[str, ...]] = ("<tool_call>", "<function=")
    openings: ClassVar[str] = ""
    inner_marks: ClassVar[tuple[str, ...]] = ("</tool_call>",)
    tag: ClassVar[CallTag | None] = None

    def read_calls(self, mark: str, cursor: TextCursor, calls: CallWriter) -> Reading[None]:
        if mark == "<tool_call>":
            yield from cursor.skip_spaces()
            if (yield from cursor.peek()) == "{":
                yield from read_call(cursor, calls)
            elif (yield from cursor.accept("<function=")):
                yield from _read_function(cursor, calls)
            else:
                raise NotACall
        else:
            yield from _read_function(cursor, calls)
        yield from cursor.skip_spaces()
        yield from cursor.accept_cut("</tool_call>")

    def new_call_id(self) -> str:
        return openai_call_id()


def _read_function(cursor: TextCursor, calls: CallWriter) -> Reading[None]:
    name = (yield from _read_name(cursor)).strip()
    calls.start(name)
    schema = calls.declared[name]
    separator = "{"
    while True:
        yield from cursor.skip_spaces()
        if (yield from cursor.accept("</function>")):
            break
        if not (yield from cursor.accept("<parameter=")):
            raise NotACall
        key = (yield from _read_name(cursor)).strip()
        calls.arguments(f"{separator}{as_json(key)}: ")
        separator = ", "
        yield from _copy_value(cursor, calls, types_of(key, schema))
    calls.arguments("{}" if separator == "{" else "}")
    calls.end()
    cursor.mark()


def _read_name(cursor: TextCursor) -> Reading[str]:
    """A name and the bracket that closes its tag."""
    name = yield from read_word(cursor, lambda char: char not in "<>\n")
    if not (yield from cursor.accept(">")):
        raise NotACall
    return name


def _copy_value(cursor: TextCursor, calls: CallWriter, types: set[str]) -> Reading[None]:
    """A value and the end of its tag. A string is passed on as it arrives, other values when they are complete."""
    yield from cursor.accept("\n")
    if types <= {"string"}:
        calls.arguments('"')
        yield from _copy_text(cursor, lambda text: calls.arguments(as_json(text)[1:-1]))
        calls.arguments('"')
        return
    pieces: list[str] = []
    yield from _copy_text(cursor, pieces.append)
    calls.arguments(converted("".join(pieces), types))


def _copy_text(cursor: TextCursor, sink: Callable[[str], None]) -> Reading[None]:
    """The text up to the end of its tag, but for one line end before that."""
    while True:
        if plain := cursor.take_run(_PLAIN):
            sink(plain)
        offset = cursor.offset
        if (yield from _accept_end(cursor)):
            return
        if cursor.exhausted:
            raise NotACall
        cursor.rewind(offset)
        sink((yield from cursor.take()))


def _accept_end(cursor: TextCursor) -> Reading[bool]:
    """Whether the end of a value comes next, and go past it. The tag that ends it may be text of the value.

    It ends the value if another value or the end of the call follows.
    """
    yield from cursor.accept("\n")
    if not (yield from cursor.accept("</parameter>")):
        return False
    yield from cursor.skip_spaces()
    return (yield from cursor.starts_with("<parameter=")) or (yield from cursor.starts_with("</function>"))


def converted(text: str, types: set[str]) -> str:
    """A value as JSON: of one of the types if it can be read so, else a string."""
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


def types_of(key: str, schema: Schema) -> set[str]:
    """Return JSON Schema's names of the types that a function's parameter may have; empty: it declares none."""
    properties = schema.get("properties")
    return _types(properties.get(key) if isinstance(properties, dict) else None, schema)


def _types(schema: Any, root: Schema, depth: int = 0) -> set[str]:
    """The types that a schema allows, as far as it names them; empty: it names none."""
    if not isinstance(schema, dict) or depth > _MAX_REFERENCES:
        return set()
    found = set(_strings(schema.get("type")))
    if not found:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        found.update(*map(_type_of, values if isinstance(values, list) else ()))
    for key in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(key)
        for branch in branches if isinstance(branches, list) else ():
            found |= _types(branch, root, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found |= _types(_referenced(reference, root), root, depth + 1)
    return found


def _strings(value: Any) -> Iterable[str]:
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, str)]


def _referenced(reference: str, root: Any) -> Any:
    """What a reference within the schema points to; None: nothing."""
    for part in reference.removeprefix("#/").split("/"):
        if not isinstance(root, dict):
            return None
        root = root.get(part.replace("~1", "/").replace("~0", "~"))
    return root
