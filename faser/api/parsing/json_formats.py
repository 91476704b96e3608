"""Formats whose calls are JSON: Hermes (Qwen, SmolLM), Llama 3.1 and later, Mistral. They share a reader.

What is passed on is JSON by RFC 8259. One thing is mended: a control character in a string, such as the end of a
line, becomes its escape. Everything else that is not JSON is refused, at the first such character.
"""

import json
import re
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

from faser.api.parsing.text_cursor import END, Reading, TextCursor
from faser.api.parsing.tool_parser import (
    CallTag,
    CallWriter,
    NotACall,
    ToolParser,
    expect,
    read_word,
    short_call_id,
)

Sink = Callable[[str], None]
_MAX_DEPTH = 64
_MAX_NUMBER_CHARS = 400  # Python's parser refuses integers of more than 4,300 digits
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_WORD = re.compile("true|false|null")
_NUMBER_CHARS = "+-.0123456789eE"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})')
_SPACE = " \t\n\r"


_FRAMES = {"```json": "```", "```": "```", "<tools>": "</tools>", "": ""}  # around a whole answer


class HermesParser(ToolParser):
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, as many as there are calls.

    A tag may also hold a list of calls, or several one after the other; the last one may lack its end. The same
    without tags, in a code block or in <tools> is a call if it is the whole answer: Qwen2.5-Coder often writes so.
    """

    marks: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    openings: ClassVar[str] = "{`<"
    ends: ClassVar[tuple[str, ...]] = ("</tool_call>",)
    tag: ClassVar[CallTag | None] = CallTag(
        trigger="<tool_call>", begin='<tool_call>\n{"name": "NAME", "arguments": ', end="}\n</tool_call>"
    )

    def read_calls(self, mark: str, cursor: TextCursor, calls: CallWriter) -> Reading[None]:
        if mark:
            yield from read_objects(cursor, calls)
            yield from cursor.accept_cut("</tool_call>")
            return
        draft, cursor.pinned = calls.draft(), True
        try:
            yield from _read_whole_answer(cursor, draft)
        except NotACall:
            cursor.rewind()
            raise
        finally:
            cursor.pinned = False
        calls.adopt(draft)


def _read_whole_answer(cursor: TextCursor, calls: CallWriter) -> Reading[None]:
    """Calls without tags, from the first character to the last."""
    begin = ""
    for each in _FRAMES:
        if (yield from cursor.accept(each)):
            begin = each
            break
    yield from read_objects(cursor, calls)
    yield from cursor.accept_cut(_FRAMES[begin])
    yield from cursor.skip_spaces()
    if (yield from cursor.peek()) != END:
        raise NotACall


def read_objects(cursor: TextCursor, calls: CallWriter) -> Reading[None]:
    """A list of calls, or one, and any that follow."""
    yield from cursor.skip_spaces()
    if (yield from cursor.peek()) == "[":
        yield from read_call_list(cursor, calls)
    else:
        yield from read_call(cursor, calls)
    yield from cursor.skip_spaces()
    while (yield from cursor.peek()) == "{":
        yield from read_call(cursor, calls)
        yield from cursor.skip_spaces()


class Llama3JsonParser(ToolParser):
    """{"name": …, "parameters": {…}}, the whole answer or after <|python_tag|>.

    Several calls follow each other, with semicolons or without.
    """

    marks: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    openings: ClassVar[str] = "{"
    tag: ClassVar[CallTag | None] = CallTag(trigger='{"name": "', begin='{"name": "NAME", "parameters": ', end="}")

    def read_calls(self, mark: str, cursor: TextCursor, calls: CallWriter) -> Reading[None]:
        del mark
        yield from cursor.skip_spaces()
        while True:
            yield from read_call(cursor, calls)
            yield from cursor.skip_spaces()
            if (yield from cursor.accept(";")):
                yield from cursor.skip_spaces()
            if (yield from cursor.peek()) != "{":
                return


_MARK, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralParser(ToolParser):
    """Parser of Mistral's calls: [TOOL_CALLS] and a list of JSON objects, or a name and its arguments.

    The second form, of tokenizers from version 11 on: [TOOL_CALLS]name{…} or [TOOL_CALLS]name[CALL_ID]id[ARGS]{…},
    the mark repeated for each call. The model's own call ids are not used: clients get ids of ours, in the form
    that the templates take.
    """

    marks: ClassVar[tuple[str, ...]] = (_MARK,)
    inner_marks: ClassVar[tuple[str, ...]] = (_ID, _ARGUMENTS)
    tag: ClassVar[CallTag | None] = CallTag(
        trigger=_MARK, begin=_MARK + '[{"name": "NAME", "arguments": ', end="}]"
    )

    def read_calls(self, mark: str, cursor: TextCursor, calls: CallWriter) -> Reading[None]:
        del mark
        yield from cursor.skip_spaces()
        match (yield from cursor.peek()):
            case "[":
                yield from read_call_list(cursor, calls)
            case "{":
                yield from read_call(cursor, calls)
            case _:
                yield from _read_named(cursor, calls)

    def new_call_id(self) -> str:
        return short_call_id()


def _read_named(cursor: TextCursor, calls: CallWriter) -> Reading[None]:
    name = yield from read_word(cursor, lambda char: char not in "[{" and not char.isspace())
    if (yield from cursor.peek()) == END:  # it may be the beginning of another name
        raise NotACall
    yield from skip_space(cursor)
    if (yield from cursor.accept(_ID)):
        yield from read_word(cursor, lambda char: char not in "[{")
    if (yield from cursor.accept(_ARGUMENTS)):
        yield from skip_space(cursor)
    calls.start(name)
    if (yield from cursor.peek()) != "{":
        raise NotACall
    yield from copy_value(cursor, calls.arguments)
    calls.end()
    cursor.mark()


def read_call(cursor: TextCursor, calls: CallWriter) -> Reading[None]:
    """One call: {"name": …, "arguments": {…}}; `parameters` is the same, and type and id are skipped.

    Arguments may also be JSON within a string, null, or missing: then there are none. What else the object has is
    skipped if it comes after these. Its braces may be doubled, as some templates show them.
    """
    named = False
    arguments: list[str] | None = None
    yield from expect(cursor, "{")
    doubled = yield from cursor.accept("{")
    while True:
        key = yield from _read_key(cursor)
        if key == "name" and not named:
            calls.start((yield from read_string(cursor)))
            named = True
            for text in arguments or ():
                calls.arguments(text)
        elif key in ("arguments", "parameters") and arguments is None:
            arguments = []
            yield from _copy_arguments(cursor, calls.arguments if named else arguments.append)
        elif key in ("type", "id") or (named and arguments is not None):
            yield from copy_value(cursor, _discard)
        else:
            raise NotACall
        if (yield from _next_or_end(cursor, "}")):
            break
    if not named:
        raise NotACall
    if doubled:
        yield from cursor.accept_cut("}")
    if arguments is None:
        calls.arguments("{}")
    calls.end()
    cursor.mark()


def read_call_list(cursor: TextCursor, calls: CallWriter) -> Reading[None]:
    """Read a list of at least one call: [{…}, {…}]."""
    yield from expect(cursor, "[")
    while True:
        yield from skip_space(cursor)
        yield from read_call(cursor, calls)
        if (yield from _next_or_end(cursor, "]")):
            cursor.mark()
            return


def _read_key(cursor: TextCursor) -> Reading[str]:
    yield from skip_space(cursor)
    key = yield from read_string(cursor)
    yield from skip_space(cursor)
    yield from expect(cursor, ":")
    yield from skip_space(cursor)
    return key


def _next_or_end(cursor: TextCursor, end: str) -> Reading[bool]:
    """Go past a comma or the end. True: it was the end."""
    yield from skip_space(cursor)
    char = yield from cursor.peek()
    if char not in (",", end):
        raise NotACall
    cursor.skip(1)
    return char == end


def _copy_arguments(cursor: TextCursor, sink: Sink) -> Reading[None]:
    match (yield from cursor.peek()):
        case "{":
            yield from copy_value(cursor, sink)
        case '"':
            text = yield from read_string(cursor)
            sink(text if _is_object(text) else "{}")
        case "n":
            yield from copy_value(cursor, _discard)
            sink("{}")
        case _:
            raise NotACall


def _is_object(text: str) -> bool:
    """Return whether a text is a JSON object; False if it is empty. Raises NotACall for anything else."""
    if not text.strip():
        return False
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise NotACall from None
    if not isinstance(value, dict):
        raise NotACall
    return True


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _discard(_: str) -> None:
    """Skip a text."""


def copy_value(cursor: TextCursor, sink: Sink, depth: int = 0) -> Reading[None]:
    """Any JSON value, passed on as it arrives."""
    if depth > _MAX_DEPTH:
        raise NotACall
    match (yield from cursor.peek()):
        case "{":
            yield from _copy_members(cursor, sink, depth, "{}")
        case "[":
            yield from _copy_members(cursor, sink, depth, "[]")
        case '"':
            yield from _copy_string(cursor, sink)
        case "t" | "f" | "n":
            sink((yield from _read_matching(_WORD, cursor, str.isalpha, limit=5)))
        case _:
            sink((yield from _read_matching(_NUMBER, cursor, _NUMBER_CHARS.__contains__, limit=_MAX_NUMBER_CHARS)))


def _read_matching(
    pattern: re.Pattern[str], cursor: TextCursor, allowed: Callable[[str], bool], *, limit: int
) -> Reading[str]:
    """A word that matches the pattern. Another one is left unread."""
    offset = cursor.offset
    word = yield from read_word(cursor, allowed, limit=limit)
    if not pattern.fullmatch(word):
        cursor.rewind(offset)
        raise NotACall
    return word


def _copy_members(cursor: TextCursor, sink: Sink, depth: int, brackets: str) -> Reading[None]:
    """An object or an array."""
    yield from expect(cursor, brackets[0])
    sink(brackets[0])
    yield from _copy_space(cursor, sink)
    if (yield from cursor.peek()) == brackets[1]:
        cursor.skip(1)
        sink(brackets[1])
        return
    while True:
        if brackets == "{}":
            yield from _copy_string(cursor, sink)
            yield from _copy_space(cursor, sink)
            yield from expect(cursor, ":")
            sink(":")
            yield from _copy_space(cursor, sink)
        yield from copy_value(cursor, sink, depth + 1)
        yield from _copy_space(cursor, sink)
        char = yield from cursor.peek()
        if char not in (",", brackets[1]):
            raise NotACall
        cursor.skip(1)
        sink(char)
        if char != ",":
            return
        yield from _copy_space(cursor, sink)


def _copy_string(cursor: TextCursor, sink: Sink) -> Reading[None]:
    yield from expect(cursor, '"')
    sink('"')
    while True:
        if plain := cursor.take_run(_PLAIN):
            sink(plain)
        char = yield from cursor.peek()
        if char == "\\":
            sink((yield from _read_escape(cursor)))
        elif char == '"':
            cursor.skip(1)
            sink('"')
            return
        elif char == END:
            raise NotACall
        elif char < " ":
            cursor.skip(1)
            sink(json.dumps(char)[1:-1])


def _read_escape(cursor: TextCursor) -> Reading[str]:
    """An escape as it is written. One that JSON does not have is left unread."""
    offset = cursor.offset
    escape = (yield from cursor.take()) + (yield from cursor.take())
    for _ in range(4 if escape == "\\u" else 0):
        escape += yield from cursor.take()
    if not _ESCAPE.fullmatch(escape):
        cursor.rewind(offset)
        raise NotACall
    return escape


def read_string(cursor: TextCursor) -> Reading[str]:
    """A JSON string, decoded. Raises NotACall also for half of a surrogate pair: no answer could contain it."""
    pieces: list[str] = []
    yield from _copy_string(cursor, pieces.append)
    text: str = json.loads("".join(pieces))
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise NotACall
    return text


def skip_space(cursor: TextCursor) -> Reading[None]:
    """Go past what JSON counts as whitespace."""
    while (char := (yield from cursor.peek())) != END and char in _SPACE:
        cursor.skip(1)


def _copy_space(cursor: TextCursor, sink: Sink) -> Reading[None]:
    while (char := (yield from cursor.peek())) != END and char in _SPACE:
        cursor.skip(1)
        sink(char)


def as_json(value: Any) -> str:
    """A value as JSON. Half of a surrogate pair stays escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(value) if any("\ud800" <= char <= "\udfff" for char in text) else text
