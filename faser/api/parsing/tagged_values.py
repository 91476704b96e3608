"""ValueTags: calls whose arguments stand one by one between tags, as bare text or as JSON.

The function's schema says which: a string is bare text.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from faser.api.parsing.json_formats import as_json
from faser.api.parsing.text_cursor import Reading, TextCursor
from faser.api.parsing.tool_parser import CallWriter, NotACall, read_word
from faser.api.parsing.typed_values import as_typed_json, member_of, types_of

_PLAIN = re.compile(r"[^<\n]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTags:
    """Tags of one format. value, name_end: around the name of an argument, in front of its value.

    on_lines: a line end next to a value's tags belongs to the format.
    """

    function_end: str
    value: str
    value_end: str
    name_end: str
    on_lines: bool

    def read_function(self, cursor: TextCursor, calls: CallWriter) -> Reading[None]:
        """Read a call from its function's name on, which name_end ends."""
        name = (yield from self.read_name(cursor)).strip()
        calls.start(name)
        schema = calls.declared[name]
        separator = "{"
        while True:
            yield from cursor.skip_spaces()
            if (yield from cursor.accept(self.function_end)):
                break
            if not (yield from cursor.accept(self.value)):
                raise NotACall
            key = (yield from self.read_name(cursor)).strip()
            calls.arguments(f"{separator}{as_json(key)}: ")
            separator = ", "
            yield from self._copy_value(cursor, calls, types_of(member_of(schema, key, schema), schema))
        calls.arguments("{}" if separator == "{" else "}")
        calls.end()
        cursor.mark()

    def read_name(self, cursor: TextCursor) -> Reading[str]:
        """A name and what closes its tag."""
        name = yield from read_word(cursor, lambda char: char not in f"<>\n{self.name_end[0]}")
        if not (yield from cursor.accept(self.name_end)):
            raise NotACall
        return name

    def _copy_value(self, cursor: TextCursor, calls: CallWriter, types: set[str]) -> Reading[None]:
        """A value and its end. A string is passed on as it arrives, other values when they are complete."""
        if self.on_lines:
            yield from cursor.accept("\n")
        if types <= {"string"}:
            calls.arguments('"')
            yield from self._copy_text(cursor, lambda text: calls.arguments(as_json(text)[1:-1]))
            calls.arguments('"')
            return
        pieces: list[str] = []
        yield from self._copy_text(cursor, pieces.append)
        calls.arguments(as_typed_json("".join(pieces), types))

    def _copy_text(self, cursor: TextCursor, sink: Callable[[str], None]) -> Reading[None]:
        """The text up to the end of its tag."""
        while True:
            if plain := cursor.take_run(_PLAIN):
                sink(plain)
            offset = cursor.offset
            if (yield from self._accept_end(cursor)):
                return
            if cursor.exhausted:
                raise NotACall
            cursor.rewind(offset)
            sink((yield from cursor.take()))

    def _accept_end(self, cursor: TextCursor) -> Reading[bool]:
        """Go past the end of a value if it comes next, and return whether it does.

        The tag may also be text of the value: it ends the value if another value or the end of the call follows.
        """
        if self.on_lines:
            yield from cursor.accept("\n")
        if not (yield from cursor.accept(self.value_end)):
            return False
        yield from cursor.skip_spaces()
        return (yield from cursor.starts_with(self.value)) or (yield from cursor.starts_with(self.function_end))
