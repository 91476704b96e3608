"""<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>: Qwen3-Coder.

A value is bare text; the function's schema says whether it is a string or JSON.
"""

import re
from collections.abc import Callable
from typing import ClassVar

from faser.api.parsing.json_formats import as_json, read_call
from faser.api.parsing.text_cursor import Reading, TextCursor
from faser.api.parsing.tool_parser import CallWriter, NotACall, ToolParser, read_word
from faser.api.parsing.typed_values import as_typed_json, member_of, types_of

_PLAIN = re.compile(r"[^<\n]+")


class Qwen3CoderParser(ToolParser):
    """The outer tag may be missing. Within it, a call in Hermes's JSON is read as well: models write both."""

    marks: ClassVar[tuple[str, ...]] = ("<tool_call>", "<function=")
    ends: ClassVar[tuple[str, ...]] = ("</tool_call>",)

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
        yield from _copy_value(cursor, calls, types_of(member_of(schema, key, schema), schema))
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
    calls.arguments(as_typed_json("".join(pieces), types))


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
    """Go past the end of a value if it comes next, and return whether it does.

    The tag may also be text of the value: it ends the value if another value or the end of the call follows.
    """
    yield from cursor.accept("\n")
    if not (yield from cursor.accept("</parameter>")):
        return False
    yield from cursor.skip_spaces()
    return (yield from cursor.starts_with("<parameter=")) or (yield from cursor.starts_with("</function>"))
