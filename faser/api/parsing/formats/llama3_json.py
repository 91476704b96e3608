"""{"name": …, "parameters": {…}}, the whole answer or after <|python_tag|>: Llama 3.1 and later."""

from typing import ClassVar

from faser.api.parsing.formats.json_text import read_call
from faser.api.parsing.text_cursor import Reading, TextCursor
from faser.api.parsing.tool_parser import CallTag, CallWriter, openai_call_id


class Llama3JsonParser:
    """Several calls follow each other, with semicolons or without."""

    marks: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    openings: ClassVar[str] = "{"
    inner_marks: ClassVar[tuple[str, ...]] = ()
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

    def new_call_id(self) -> str:
        return openai_call_id()
