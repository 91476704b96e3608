"""<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>: Qwen3-Coder.

A value is bare text; the function's schema says whether it is a string or JSON.
"""

from typing import ClassVar

from faser.api.parsing.json_formats import read_call
from faser.api.parsing.tagged_values import ValueTags
from faser.api.parsing.text_cursor import Reading, TextCursor
from faser.api.parsing.tool_parser import CallWriter, NotACall, ToolParser

_TAGS = ValueTags(
    function_end="</function>", value="<parameter=", value_end="</parameter>", name_end=">", on_lines=True
)


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
                yield from _TAGS.read_function(cursor, calls)
            else:
                raise NotACall
        else:
            yield from _TAGS.read_function(cursor, calls)
        yield from cursor.skip_spaces()
        yield from cursor.accept_cut("</tool_call>")
