"""Muse Glimmer: a dialect of harmony in which the recipient is the channel, and calls are written in tags.

     to=self<|message|>…<|eom|><|start|>assistant to=NAME<|message|><atem:function_calls>
    <atem:invoke name="NAME">
    <atem:parameter name="key">value</atem:parameter>
    </atem:invoke>
    </atem:function_calls><|eom|><|start|>assistant to=user<|message|>…<|eot|>

What is to=self is reasoning. Strings and scalars are bare text, lists and objects JSON; spaces belong to a string.
Tags in reasoning or in the answer are text: only a message to a function calls it.
"""

from typing import ClassVar

from faser.api.parsing.harmony import MESSAGE, START, Harmony
from faser.api.parsing.tagged_values import ValueTags
from faser.api.parsing.text_cursor import Reading, TextCursor
from faser.api.parsing.tool_parser import CallWriter, NotACall, ToolParser

MUSE_GLIMMER = Harmony(
    reasoning=f" to=self{MESSAGE}",
    answer=f" to=user{MESSAGE}",
    sign="to=self",
    ends=("<|eom|>", "<|eot|>"),
    in_headers=(START, MESSAGE),
    no_functions=("self", "user"),
    efforts=("low", "medium", "high", "xhigh"),
)
_BLOCK, _END_BLOCK, _INVOKE = "<atem:function_calls>", "</atem:function_calls>", '<atem:invoke name="'
_TAGS = ValueTags(
    function_end="</atem:invoke>",
    value='<atem:parameter name="',
    value_end="</atem:parameter>",
    name_end='">',
    on_lines=False,
)


class MuseGlimmerParser(ToolParser):
    """A message to a function, whose body is a block of one call or more."""

    marks: ClassVar[tuple[str, ...]] = (START, " to=")
    ends: ClassVar[tuple[str, ...]] = MUSE_GLIMMER.ends
    inner_marks: ClassVar[tuple[str, ...]] = (MESSAGE,)

    def read_calls(self, mark: str, cursor: TextCursor, calls: CallWriter) -> Reading[None]:
        recipient = MUSE_GLIMMER.function_of(mark + (yield from MUSE_GLIMMER.read_header(cursor)))
        if recipient is None:
            raise NotACall
        if recipient in calls.declared:
            calls.start(recipient)  # an answer that is cut off here has begun this call
        yield from cursor.skip_spaces()
        if not (yield from cursor.accept(_BLOCK)):
            raise NotACall
        yield from cursor.skip_spaces()
        if not (yield from cursor.accept(_INVOKE)):
            raise NotACall
        while True:
            yield from _TAGS.read_function(cursor, calls)
            yield from cursor.skip_spaces()
            if not (yield from cursor.accept_cut(_INVOKE)):
                break
        yield from cursor.accept_cut(_END_BLOCK)
        yield from cursor.skip_spaces()
        for end in self.ends:
            if (yield from cursor.accept_cut(end)):
                return
