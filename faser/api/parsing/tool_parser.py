"""ToolParser: a format of tool calls, and what reads the calls of an answer by it.

A parser reads calls from the first mark on. Text that turns out to be no call, at whatever character, is content:
no character of an answer is lost but whitespace around calls and the format's own marks.
"""

import secrets
import string
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from faser.api.parsing.events import (
    AnswerEvent,
    ContentText,
    ToolCallAbandoned,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from faser.api.parsing.text_cursor import END, Reading, TextCursor

Schema = Mapping[str, Any]


class NotACall(Exception):
    """What was read since the cursor's mark is not a call."""


class CallTag:
    """How a call is written where its arguments are a JSON object: begin, the object, end."""

    def __init__(self, *, trigger: str | None, begin: str, end: str) -> None:
        """trigger: text with which every call begins; None: no grammar finds calls among other text.

        begin: has NAME for the function.
        """
        self.trigger, self._begin, self.end = trigger, begin, end

    def begin(self, name: str) -> str:
        return self._begin.replace("NAME", name)


class ToolParser(Protocol):
    """One format.

    marks: where calls may begin, anywhere in an answer. openings: characters of which one begins an answer that
    consists of calls; the answer need not be one. inner_marks: further texts of the format that may be special
    tokens. tag: how a grammar writes a call; None: the format is not made of JSON.
    """

    marks: ClassVar[tuple[str, ...]]
    openings: ClassVar[str]
    inner_marks: ClassVar[tuple[str, ...]]
    tag: ClassVar[CallTag | None]

    def read_calls(self, mark: str, cursor: TextCursor, calls: "CallWriter") -> Reading[None]:
        """Read one or more calls. mark: was just read; empty at an opening, which was not.

        Marks the cursor after each call. Raises NotACall at the first character that does not fit; that one is
        left unread.
        """
        ...

    def new_call_id(self) -> str: ...


class CallWriter:
    """Writes the events of calls. declared: the parameters' JSON schema of each function that may be called.

    parallel: if not, only the first call is reported.
    """

    def __init__(self, declared: Mapping[str, Schema], new_call_id: Callable[[], str], *, parallel: bool) -> None:
        self.declared = declared
        self.events: list[AnswerEvent] = []
        self.num_complete = 0
        self._new_call_id = new_call_id
        self._parallel = parallel
        self._num_begun = 0
        self._open = False

    def start(self, name: str) -> None:
        """Begin a call. Raises NotACall if the function is not declared."""
        if name not in self.declared:
            raise NotACall
        self._open = True
        if self._reports:
            self.events.append(ToolCallStart(index=self._num_begun, call_id=self._new_call_id(), name=name))

    def arguments(self, text: str) -> None:
        if self._reports:
            self.events.append(ToolCallArguments(index=self._num_begun, text=text))

    def end(self) -> None:
        if self._reports:
            self.events.append(ToolCallEnd(index=self._num_begun))
        self._num_begun += 1
        self.num_complete += 1
        self._open = False

    def abandon(self, text: str) -> None:
        """The call that has begun, if one has, is none. text: all of it."""
        if self._open:
            if self._reports:
                self.events.append(ToolCallAbandoned(index=self._num_begun))
            self._num_begun += 1
            self._open = False
        self.content(text)

    def content(self, text: str) -> None:
        if text:
            self.events.append(ContentText(text=text))

    @property
    def _reports(self) -> bool:
        return self._parallel or self.num_complete == 0


class ToolCallReader:
    """Content and tool calls of one answer."""

    def __init__(self, parser: ToolParser, declared: Mapping[str, Schema], *, parallel: bool) -> None:
        self._parser = parser
        self._cursor = TextCursor()
        self._calls = CallWriter(declared, parser.new_call_id, parallel=parallel)
        self._reading = self._read()

    def push(self, text: str, *, complete: bool) -> list[AnswerEvent]:
        """What the next piece of the answer adds. complete: it is the last."""
        self._cursor.push(text, complete=complete)
        next(self._reading, None)
        events, self._calls.events = self._calls.events, []
        return events

    @property
    def num_complete(self) -> int:
        """Complete calls so far."""
        return self._calls.num_complete

    def _read(self) -> Reading[None]:
        cursor, parser = self._cursor, self._parser
        if parser.openings:
            yield from cursor.skip_spaces()
            if (yield from cursor.peek()) in tuple(parser.openings):
                yield from self._read_calls("")
        while True:
            mark = yield from cursor.copy_until(parser.marks, self._calls.content, trailing=None)
            if mark is None:
                return
            yield from self._read_calls(mark)

    def _read_calls(self, mark: str) -> Reading[None]:
        try:
            yield from self._parser.read_calls(mark, self._cursor, self._calls)
            yield from self._cursor.skip_spaces()
        except NotACall:
            self._calls.abandon(self._cursor.since_mark())
        self._cursor.mark()


def openai_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Nine letters and digits, as the templates of Mistral demand."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def expect(cursor: TextCursor, char: str) -> Reading[None]:
    """Go past one character. Raises NotACall if another comes next."""
    if (yield from cursor.peek()) != char:
        raise NotACall
    cursor.skip(1)


def read_word(cursor: TextCursor, allowed: Callable[[str], bool], *, limit: int = 256) -> Reading[str]:
    """Characters up to one that is not allowed. Raises NotACall for none, and for more than the limit."""
    word = ""
    while (char := (yield from cursor.peek())) != END and allowed(char):
        word += char
        cursor.skip(1)
        if len(word) > limit:
            raise NotACall
    if not word:
        raise NotACall
    return word
