"""Formats of a mark and JSON: Granite 3, Phi-4-mini, and Mistral from its tokenizers of version 11 on.

They share the readers of json_formats.py.
"""

from typing import ClassVar

from faser.api.parsing.json_formats import MistralParser, read_objects
from faser.api.parsing.text_cursor import Reading, TextCursor
from faser.api.parsing.tool_parser import CallTag, CallWriter, NotACall, ToolParser

_CALL, _END_CALL, _FUNCTOOLS = "<|tool_call|>", "<|/tool_call|>", "functools"


class GraniteParser(ToolParser):
    """<|tool_call|>[{"name": …, "arguments": {…}}, …]: Granite 3; some of its answers have <tool_call> instead."""

    marks: ClassVar[tuple[str, ...]] = (_CALL, "<tool_call>")
    ends: ClassVar[tuple[str, ...]] = ("</tool_call>",)
    tag: ClassVar[CallTag | None] = CallTag(
        trigger=_CALL, begin=_CALL + '[{"name": "NAME", "arguments": ', end="}]"
    )

    def read_calls(self, mark: str, cursor: TextCursor, calls: CallWriter) -> Reading[None]:
        del mark
        yield from read_objects(cursor, calls)
        yield from cursor.accept_cut("</tool_call>")


class Phi4MiniParser(ToolParser):
    """<|tool_call|>[{"name": …, "arguments": {…}}, …]<|/tool_call|>, or functools[…]."""

    marks: ClassVar[tuple[str, ...]] = (_CALL, _FUNCTOOLS)
    ends: ClassVar[tuple[str, ...]] = (_END_CALL,)
    tag: ClassVar[CallTag | None] = CallTag(
        trigger=_CALL, begin=_CALL + '[{"name": "NAME", "arguments": ', end="}]" + _END_CALL
    )

    def read_calls(self, mark: str, cursor: TextCursor, calls: CallWriter) -> Reading[None]:
        if mark == _FUNCTOOLS and (yield from cursor.peek()) != "[":
            raise NotACall
        yield from read_objects(cursor, calls)
        yield from cursor.accept_cut(_END_CALL)


class NamedMistralParser(MistralParser):
    """MistralParser for templates with [ARGS]: a grammar writes calls as [TOOL_CALLS]name[ARGS]{…}."""

    tag: ClassVar[CallTag | None] = CallTag(trigger="[TOOL_CALLS]", begin="[TOOL_CALLS]NAME[ARGS]", end="")
