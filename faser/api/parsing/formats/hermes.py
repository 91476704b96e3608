"""<tool_call>{"name": …, "arguments": {…}}</tool_call>, as many as there are calls: Hermes, Qwen, SmolLM."""

from typing import ClassVar

from faser.api.parsing.formats.json_text import read_call, read_call_list
from faser.api.parsing.text_cursor import Reading, TextCursor
from faser.api.parsing.tool_parser import CallTag, CallWriter, openai_call_id


class HermesParser:
    """A tag may also hold a list of calls, or several one after the other; the last one may lack its end."""

    marks: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    openings: ClassVar[str] = ""
    inner_marks: ClassVar[tuple[str, ...]] = ("</tool_call>",)
    tag: ClassVar[CallTag | None] = CallTag(
        trigger="<tool_call>", begin='<tool_call>\n{"name": "NAME", "arguments": ', end="}\n</tool_call>"
    )

    def read_calls(self, mark: str, cursor: TextCursor, calls: CallWriter) -> Reading[None]:
        del mark
        yield from cursor.skip_spaces()
        if (yield from cursor.peek()) == "[":
            yield from read_call_list(cursor, calls)
        else:
            yield from read_call(cursor, calls)
        yield from cursor.skip_spaces()
        while (yield from cursor.peek()) == "{":
            yield from read_call(cursor, calls)
            yield from cursor.skip_spaces()
        yield from cursor.accept("</tool_call>")

    def new_call_id(self) -> str:
        return openai_call_id()
