"""<|tool_call>call:name{key:<|"|>value<|"|>}<tool_call|>: Gemma 4, which thinks in <|channel>thought … <channel|>.

Keys are bare, strings stand between <|"|> without escapes, everything else is written as in JSON. JSON's own
strings are read as well: a grammar that enforces a call writes its arguments as JSON. The schema of a function
says what a bare value is; null is null even where it says that there is a string.
"""

import re
from collections.abc import Callable
from typing import Any, ClassVar

from faser.api.parsing.answer_parser import ThinkMarks
from faser.api.parsing.json_formats import as_json, copy_value, read_string, skip_space
from faser.api.parsing.text_cursor import END, Reading, TextCursor
from faser.api.parsing.tool_parser import (
    CallTag,
    CallWriter,
    NotACall,
    Schema,
    ToolParser,
    expect,
    read_word,
)
from faser.api.parsing.typed_values import ANY_BUT_STRING, as_typed_json, member_of, types_of

Sink = Callable[[str], None]

_CALL, _END_CALL, _QUOTE, _PREFIX = "<|tool_call>", "<tool_call|>", '<|"|>', "call:"
_END_CHANNEL = "<channel|>"
GEMMA4_MARKS = ThinkMarks(begin="<|channel>", end=_END_CHANNEL, label="thought\n", drops_stray_ends=True)
_PLAIN = re.compile("[^<]+")
_MAX_DEPTH = 64
_MAX_BARE_CHARS = 4096


class Gemma4Parser(ToolParser):
    """A call may also follow the end of the reasoning directly, or begin the answer, without its own mark."""

    marks: ClassVar[tuple[str, ...]] = (_CALL, _END_CHANNEL)
    openings: ClassVar[str] = "c"
    ends: ClassVar[tuple[str, ...]] = (_END_CALL,)
    inner_marks: ClassVar[tuple[str, ...]] = (_QUOTE,)
    tag: ClassVar[CallTag | None] = CallTag(trigger=_CALL, begin=f"{_CALL}{_PREFIX}NAME", end=_END_CALL)

    def read_calls(self, mark: str, cursor: TextCursor, calls: CallWriter) -> Reading[None]:
        if mark:
            yield from cursor.skip_spaces()
        if not (yield from cursor.accept(_PREFIX)):
            raise NotACall
        name = yield from read_word(cursor, lambda char: char != "{" and not char.isspace())
        if (yield from cursor.peek()) != "{":
            raise NotACall
        calls.start(name)
        schema = calls.declared[name]
        yield from _ArgumentsReader(cursor, calls.arguments, schema).copy_members(schema, "{}", 0)
        calls.end()
        cursor.mark()
        yield from skip_space(cursor)
        yield from cursor.accept_cut(_END_CALL)


class _ArgumentsReader:
    """Passes the arguments of a call on as JSON. A part that it refuses is left unread."""

    def __init__(self, cursor: TextCursor, sink: Sink, root: Schema) -> None:
        """root: the schema of all arguments."""
        self._cursor, self._sink, self._root = cursor, sink, root

    def copy_members(self, schema: Any, brackets: str, depth: int) -> Reading[None]:
        """Pass on an object or a list."""
        cursor, sink = self._cursor, self._sink
        if depth > _MAX_DEPTH:
            raise NotACall
        yield from expect(cursor, brackets[0])
        sink(brackets[0])
        yield from skip_space(cursor)
        empty = True
        while not (yield from cursor.accept(brackets[1])):
            if not empty:
                yield from expect(cursor, ",")
                sink(", ")
                yield from skip_space(cursor)
            empty = False
            key = (yield from self._or_rewind(self._copy_key())) if brackets == "{}" else None
            yield from self._copy_value(member_of(schema, key, self._root), depth)
            yield from skip_space(cursor)
        sink(brackets[1])

    def _copy_key(self) -> Reading[str]:
        cursor = self._cursor
        if (yield from cursor.peek()) == '"':
            key = yield from read_string(cursor)
        elif (yield from cursor.accept(_QUOTE)):
            pieces: list[str] = []
            yield from _read_text(cursor, pieces.append, ":")
            key = "".join(pieces)
        else:
            key = (yield from read_word(cursor, lambda char: char not in ":,{}[]<\n")).strip()
        yield from skip_space(cursor)
        yield from expect(cursor, ":")
        yield from skip_space(cursor)
        self._sink(f"{as_json(key)}: ")
        return key

    def _copy_value(self, schema: Any, depth: int) -> Reading[None]:
        cursor, sink = self._cursor, self._sink
        if (yield from cursor.accept(_QUOTE)):
            sink('"')
            yield from _read_text(cursor, lambda text: sink(as_json(text)[1:-1]), ",}]")
            sink('"')
            return
        match (yield from cursor.peek()):
            case "{":
                yield from self.copy_members(schema, "{}", depth + 1)
            case "[":
                yield from self.copy_members(schema, "[]", depth + 1)
            case '"':
                yield from copy_value(cursor, sink)
            case _:
                types = types_of(schema, self._root) or ANY_BUT_STRING
                word = yield from self._or_rewind(_read_bare(cursor))
                sink(as_typed_json(word, types | {"null"}))

    def _or_rewind(self, reading: Reading[str]) -> Reading[str]:
        """Read a part that is passed on as a whole; one that is refused is left unread."""
        offset = self._cursor.offset
        try:
            return (yield from reading)
        except NotACall:
            self._cursor.rewind(offset)
            raise


def _read_bare(cursor: TextCursor) -> Reading[str]:
    """A value without quotes. Raises NotACall for one that the end of the text may have cut."""
    word = yield from read_word(cursor, lambda char: char not in ",{}[]<\n", limit=_MAX_BARE_CHARS)
    if (yield from cursor.peek()) == END:
        raise NotACall
    return word.strip()


def _read_text(cursor: TextCursor, sink: Sink, followers: str) -> Reading[None]:
    """Pass a string on up to the quote that closes it: the first one in front of one of the followers."""
    while True:
        if plain := cursor.take_run(_PLAIN):
            sink(plain)
        offset = cursor.offset
        if (yield from cursor.accept(_QUOTE)):
            follower = yield from cursor.peek()
            if follower != END and follower in followers:
                return
            cursor.rewind(offset)
        if (yield from cursor.peek()) == END or cursor.exhausted:
            raise NotACall
        sink((yield from cursor.take()))
