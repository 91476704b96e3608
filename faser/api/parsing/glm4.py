"""name, a line end, and the arguments in JSON: GLM-4, whose calls have no mark of their own.

Only the name of a declared function on a line of its own, with an object on the next one, begins a call: at the
beginning of the answer, after <|assistant|>, or after another call.
"""

import string
from typing import ClassVar

from faser.api.parsing.json_formats import copy_value, skip_space
from faser.api.parsing.text_cursor import Reading, TextCursor
from faser.api.parsing.tool_parser import CallTag, CallWriter, NotACall, ToolParser, expect, read_word

_ASSISTANT, _OBSERVATION = "<|assistant|>", "<|observation|>"
_NAME = frozenset(string.ascii_letters + string.digits + "_-.")


class Glm4Parser(ToolParser):
    """A grammar has no text that ends a call: the end of the answer does."""

    marks: ClassVar[tuple[str, ...]] = (_ASSISTANT,)
    openings: ClassVar[str] = string.ascii_letters + string.digits + "_"
    ends: ClassVar[tuple[str, ...]] = (_OBSERVATION,)
    tag: ClassVar[CallTag | None] = CallTag(trigger=None, begin="NAME\n", end="")

    def read_calls(self, mark: str, cursor: TextCursor, calls: CallWriter) -> Reading[None]:
        if mark:
            yield from cursor.skip_spaces()
        yield from _read_call(cursor, calls)
        while True:
            yield from cursor.skip_spaces()
            if (yield from cursor.peek()) not in tuple(self.openings):
                break
            yield from _read_call(cursor, calls)
        yield from cursor.accept_cut(_OBSERVATION)


def _read_call(cursor: TextCursor, calls: CallWriter) -> Reading[None]:
    name = yield from read_word(cursor, lambda char: char in _NAME)
    if name not in calls.declared:
        raise NotACall
    while (yield from cursor.accept(" ")):
        pass
    yield from expect(cursor, "\n")
    yield from skip_space(cursor)
    if (yield from cursor.peek()) != "{":
        raise NotACall
    calls.start(name)
    yield from copy_value(cursor, calls.arguments)
    calls.end()
    cursor.mark()
