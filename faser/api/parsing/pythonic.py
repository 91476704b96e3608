"""Parser of calls written as a Python list, [name(key=value, …), …], the whole answer: Llama 3.2 and 4, ToolACE.

Values are literals that JSON has too. Nothing is computed, and no name is looked up.
"""

import ast
import math
import warnings
from typing import Any, ClassVar

from faser.api.parsing.json_formats import as_json
from faser.api.parsing.text_cursor import END, Reading, TextCursor
from faser.api.parsing.tool_parser import CallWriter, NotACall, ToolParser, expect, read_word

_WORDS = {"true": True, "false": False, "null": None}  # JSON's, which models mix in
_CLOSING = {"[": "]", "{": "}", "(": ")"}


class PythonicParser(ToolParser):
    """Values are literals: strings, numbers, truth values, None, lists, tuples and dicts with strings as keys."""

    marks: ClassVar[tuple[str, ...]] = ("<|python_start|>",)
    openings: ClassVar[str] = "["
    ends: ClassVar[tuple[str, ...]] = ("<|python_end|>",)

    def read_calls(self, mark: str, cursor: TextCursor, calls: CallWriter) -> Reading[None]:
        del mark
        yield from cursor.skip_spaces()
        yield from expect(cursor, "[")
        while True:
            yield from cursor.skip_spaces()
            yield from _read_call(cursor, calls)
            yield from cursor.skip_spaces()
            if (yield from cursor.accept("]")):
                break
            yield from expect(cursor, ",")
        cursor.mark()
        yield from cursor.skip_spaces()
        yield from cursor.accept_cut(self.ends[0])


class Lfm2Parser(PythonicParser):
    """Parser of LFM2's calls: a Python list of them behind a mark, anywhere in an answer."""

    marks: ClassVar[tuple[str, ...]] = ("<|tool_call_start|>",)
    openings: ClassVar[str] = ""
    ends: ClassVar[tuple[str, ...]] = ("<|tool_call_end|>",)


def _read_call(cursor: TextCursor, calls: CallWriter) -> Reading[None]:
    name = yield from read_word(cursor, lambda char: char.isalnum() or char in "_.-")
    yield from expect(cursor, "(")
    calls.start(name)
    separator = "{"
    while True:
        yield from cursor.skip_spaces()
        if (yield from cursor.accept(")")):
            break
        key = yield from read_word(cursor, lambda char: char.isalnum() or char == "_")
        yield from cursor.skip_spaces()
        yield from expect(cursor, "=")
        value = _as_json((yield from _read_literal(cursor)))
        calls.arguments(f"{separator}{as_json(key)}: {value}")
        separator = ", "
        if not (yield from cursor.accept(",")) and not (yield from cursor.starts_with(")")):
            raise NotACall
    calls.arguments("{}" if separator == "{" else "}")
    calls.end()
    cursor.mark()


def _read_literal(cursor: TextCursor) -> Reading[str]:
    """The text of a literal, up to the comma or bracket behind it."""
    text = ""
    closing: list[str] = []
    while True:
        char = yield from cursor.peek()
        if char == END or (char in ")]}" and closing and char != closing[-1]):
            raise NotACall
        if not closing and char in ",)":
            return text
        if char in ")]}":
            if not closing:
                raise NotACall
            closing.pop()
        elif char in _CLOSING:
            closing.append(_CLOSING[char])
        elif char in "'\"":
            text += yield from _read_string(cursor)
            continue
        cursor.skip(1)
        text += char


def _read_string(cursor: TextCursor) -> Reading[str]:
    """The text of a string literal, quotes included."""
    quote = yield from cursor.peek()
    if (yield from cursor.starts_with(quote * 3)):
        quote *= 3
    yield from cursor.accept(quote)
    text = quote
    while not (yield from cursor.accept(quote)):
        char = yield from cursor.take()
        if char == "\\":
            char += yield from cursor.take()
        if char in (END, "\\"):
            raise NotACall
        text += char
    return text + quote


def _as_json(literal: str) -> str:
    try:
        return as_json(literal_value(literal))
    except ValueError:
        raise NotACall from None


def literal_value(text: str) -> Any:
    """A string, number, truth value, None, list, tuple, or dict with strings as keys.

    Raises ValueError for anything else.
    """
    try:
        with warnings.catch_warnings():  # unknown escapes, which Python keeps
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(), mode="eval")
        return _value(tree.body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | str()):
            return node.value
        case ast.Constant(value=float() as number) if math.isfinite(number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)) if math.isfinite(
            number
        ) and not isinstance(number, bool):
            return -number
        case ast.List() | ast.Tuple():
            return [_value(each) for each in node.elts]
        case ast.Dict():
            return {_key(key): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
        case ast.Name() if node.id in _WORDS:
            return _WORDS[node.id]
    raise ValueError(f"{ast.dump(node)[:80]} is not a literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a key is not a string")
