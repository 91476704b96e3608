"""<|tool_call>call:name{key:<|"|>value<|"|>}<tool_call|>: Gemma 4, which thinks in <|channel>thought … <channel|>.

Keys are bare, strings stand between <|"|> without escapes, everything else is written as in JSON. JSON's own
strings are read as well: a grammar that enforces a call writes its arguments as JSON.
"""

import json
import re
from collections.abc import Callable
from typing import ClassVar

from faser.api.parsing.answer_parser import ThinkMarks
from faser.api.parsing.json_formats import as_json, copy_value, read_string, skip_space
from faser.api.parsing.pythonic import literal_value
from faser.api.parsing.qwen3_coder import converted, types_of
from faser.api.parsing.text_cursor import END, Reading, TextCursor
from faser.api.parsing.tool_parser import (
    CallTag,
    CallWriter,
    NotACall,
    Schema,
    expect,
    openai_call_id,
    read_word,
)

Sink = Callable[[str], None]

_CALL, _END_CALL, _QUOTE, _PREFIX = "<|tool_call>", "<tool_call|>", '<|"|>', "call:"
_END_CHANNEL = "<channel|>"
GEMMA4_MARKS = ThinkMarks(begin="<|channel>", end=_END_CHANNEL, label="thought\n", resumes=_PREFIX)
_PLAIN = re.compile("[^<]+")
_MAX_DEPTH = 64
_MAX_BARE_CHARS = 4096


class Gemma4Parser:
    """A call may also follow the end of the reasoning directly, or begin the answer, without its own mark."""

    marks: ClassVar[tuple[str, ...]] = (_CALL, _END_CHANNEL)
    openings: ClassVar[str] = "c"
    inner_marks: ClassVar[tuple[str, ...]] = (_END_CALL, _QUOTE)
    tag: ClassVar[CallTag | None] = CallTag(trigger=_CALL, begin=f"{_CALL}{_PREFIX}NAME", end=_END_CALL)

    def read_calls(self, mark: str, cursor: TextCursor, calls: CallWriter) -> Reading[None]:
        if mark:
            yield from cursor.skip_spaces()
        if not (yield from cursor.accept(_PREFIX)):
            raise NotACall
        name = yield from read_word(cursor, lambda char: char != "{" and not char.isspace())
        calls.start(name)
        yield from _copy_members(cursor, calls.arguments, "{}", 0, calls.declared[name])
        calls.end()
        cursor.mark()
        yield from skip_space(cursor)
        yield from cursor.accept_cut(_END_CALL)

    def new_call_id(self) -> str:
        return openai_call_id()


def _copy_members(
    cursor: TextCursor, sink: Sink, brackets: str, depth: int, schema: Schema | None = None
) -> Reading[None]:
    """Pass on an object or a list as JSON. schema: of an object whose values without quotes have types."""
    if depth > _MAX_DEPTH:
        raise NotACall
    yield from expect(cursor, brackets[0])
    sink(brackets[0])
    yield from skip_space(cursor)
    separator = ""
    while not (yield from cursor.accept(brackets[1])):
        if separator:
            yield from expect(cursor, ",")
            yield from skip_space(cursor)
        sink(separator)
        separator = ", "
        key = (yield from _copy_key(cursor, sink)) if brackets == "{}" else ""
        yield from _copy_value(cursor, sink, depth, types_of(key, schema) if schema else set())
        yield from skip_space(cursor)
    sink(brackets[1])


def _copy_key(cursor: TextCursor, sink: Sink) -> Reading[str]:
    """Pass on a key once it is complete, and return it."""
    if (yield from cursor.peek()) == '"':
        key = yield from read_string(cursor)
    elif (yield from cursor.accept(_QUOTE)):
        pieces: list[str] = []
        yield from _copy_text(cursor, pieces.append, ":")
        key = json.loads("".join(pieces))
    else:
        key = (yield from read_word(cursor, lambda char: char not in ":,{}[]<\n")).strip()
    yield from skip_space(cursor)
    yield from expect(cursor, ":")
    sink(as_json(key) + ": ")
    yield from skip_space(cursor)
    return key


def _copy_value(cursor: TextCursor, sink: Sink, depth: int, types: set[str]) -> Reading[None]:
    if (yield from cursor.accept(_QUOTE)):
        yield from _copy_text(cursor, sink, ",}]")
        return
    match (yield from cursor.peek()):
        case "{":
            yield from _copy_members(cursor, sink, "{}", depth + 1)
        case "[":
            yield from _copy_members(cursor, sink, "[]", depth + 1)
        case '"':
            yield from copy_value(cursor, sink)
        case _:
            word = yield from read_word(cursor, lambda char: char not in ",{}[]<\n", limit=_MAX_BARE_CHARS)
            if cursor.exhausted:  # the rest of the value is not there
                raise NotACall
            sink(converted(word, types) if types else _bare(word.strip()))


def _copy_text(cursor: TextCursor, sink: Sink, followers: str) -> Reading[None]:
    """Pass on a string up to the quote that closes it: the first one in front of one of the followers."""
    sink('"')
    while True:
        if plain := cursor.take_run(_PLAIN):
            sink(as_json(plain)[1:-1])
        if (yield from cursor.accept(_QUOTE)):
            follower = yield from cursor.peek()
            if follower == END:
                raise NotACall
            if follower in followers:
                break
            sink(as_json(_QUOTE)[1:-1])
            continue
        if cursor.exhausted:
            raise NotACall
        sink(as_json((yield from cursor.take()))[1:-1])
    sink('"')


def _bare(word: str) -> str:
    """Return a value without quotes as JSON: a number, a truth value or null, else a string."""
    try:
        return as_json(literal_value(word))
    except ValueError:
        return as_json(word)
