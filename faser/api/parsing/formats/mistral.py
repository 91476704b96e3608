"""[TOOL_CALLS] and a list of JSON objects, or a name and its arguments: Mistral's models.

The second form, of tokenizers from version 11 on: [TOOL_CALLS]name{…} or [TOOL_CALLS]name[CALL_ID]id[ARGS]{…}, the
mark repeated for each call.
"""

from typing import ClassVar

from faser.api.parsing.formats.json_text import copy_value, read_call, read_call_list, skip_space
from faser.api.parsing.text_cursor import Reading, TextCursor
from faser.api.parsing.tool_parser import CallTag, CallWriter, NotACall, read_word, short_call_id

_MARK, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralParser:
    """The model's own call ids are not used: clients get ids of ours, in the form that the templates take."""

    marks: ClassVar[tuple[str, ...]] = (_MARK,)
    openings: ClassVar[str] = ""
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
