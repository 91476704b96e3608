"""ToolParser: a format of tool calls, and what reads the calls of an answer by it.

A parser reads calls from the first mark on. Text that turns out to be no call is content, to the last character.

A call begins with the first key of its arguments, and is reported from there on. If its text is malformed after
that, or ends, it stays a call, and its arguments are what the model wrote. A call that the answer's length cuts
off after its name is one too. Markup at the cut is left out once an answer has a call.
"""

import secrets
import string
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from faser.api.parsing.events import (
    AnswerEvent,
    ContentText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from faser.api.parsing.text_cursor import END, Reading, TextCursor

Schema = Mapping[str, Any]


class NotACall(Exception):
    """Raised where the text read since the cursor's mark is not a call."""


class CallTag:
    """Notation of a call whose arguments are a JSON object: begin, the object, end."""

    def __init__(self, *, trigger: str | None, begin: str, end: str) -> None:
        """trigger: text with which every call begins; None: no grammar finds calls among other text.

        begin: has NAME for the function.
        """
        self.trigger, self._begin, self.end = trigger, begin, end

    def begin(self, name: str) -> str:
        return self._begin.replace("NAME", name)


class ToolParser:
    """One format. This one has no calls: all of an answer is content.

    marks: where calls may begin, anywhere in an answer. openings: characters of which one begins an answer that
    consists of calls; the answer need not be one. ends: texts of which one ends a call. inner_marks: further texts
    of the format that may be special tokens. tag: how a grammar writes a call; None: the format is not JSON.
    """

    marks: ClassVar[tuple[str, ...]] = ()
    openings: ClassVar[str] = ""
    ends: ClassVar[tuple[str, ...]] = ()
    inner_marks: ClassVar[tuple[str, ...]] = ()
    tag: ClassVar[CallTag | None] = None

    def read_calls(self, _mark: str, _cursor: TextCursor, _calls: "CallWriter") -> Reading[None]:
        """Read one or more calls. mark: was just read; empty at an opening, which was not.

        Marks the cursor after each call. Raises NotACall at the first character that does not fit; that one is
        left unread. Markup that may be cut off at the end of an answer is read with cursor.accept_cut.
        """
        raise NotACall

    def new_call_id(self) -> str:
        return openai_call_id()


NO_CALLS = ToolParser()


class CallWriter:
    """Writes the events of calls. declared: the parameters' JSON schema of each function that may be called.

    parallel: if not, only the first call is reported.
    """

    def __init__(self, declared: Mapping[str, Schema], new_call_id: Callable[[], str], *, parallel: bool) -> None:
        self.declared = declared
        self.events: list[AnswerEvent] = []
        self.num_calls = 0  # that have begun
        self._new_call_id = new_call_id
        self._parallel = parallel
        self._name: str | None = None  # of the call in progress
        self._held = ""  # arguments of a call that has not begun
        self._begun = False  # whether the call in progress is reported from now on
        self._content_begun = False
        self._separator = ""

    def start(self, name: str) -> None:
        """Start a call, which begins with its arguments. Raises NotACall if the function is not declared."""
        if name not in self.declared:
            raise NotACall
        self._name, self._held = name, ""

    def arguments(self, text: str) -> None:
        if not self._begun:
            self._held += text
            if ":" not in text:
                return
            text = self._begin()
        self._write_arguments(text)

    def end(self) -> None:
        """The call is complete."""
        if not self._begun:
            self._write_arguments(self._begin())
        if self._reported:
            self.events.append(ToolCallEnd(index=self.num_calls - 1))
        self._name, self._begun = None, False

    def keep_unfinished(self, *, cut: bool) -> bool:
        """Return whether the call in progress stays one although its text does not go on as a call.

        cut: the answer's length cut it off.
        """
        if cut and self._name is not None and not self._begun:
            self._write_arguments(self._begin())
        kept, self._name, self._begun = self._begun, None, False
        return kept

    def malformed(self, text: str) -> None:
        """Add text to the arguments of the call that was kept last."""
        self._write_arguments(text)

    def content(self, text: str) -> None:
        if text:
            separator = self._separator if self._content_begun else ""
            self.events.append(ContentText(text=separator + text))
            self._content_begun, self._separator = True, ""

    def separate(self, space: str) -> None:
        """Remember whitespace next to a call; the first there is separates the texts before and after calls."""
        self._separator = self._separator or space

    def draft(self) -> "CallWriter":
        """A writer for calls that are reported only if `adopt` takes them."""
        return CallWriter(self.declared, self._new_call_id, parallel=self._parallel)

    def adopt(self, draft: "CallWriter") -> None:
        """Report the calls of a draft, before any others."""
        self.events += draft.events
        self.num_calls += draft.num_calls

    def _begin(self) -> str:
        """Begin the call that was started. Its arguments so far."""
        assert self._name is not None
        self._begun = True
        self.num_calls += 1
        if self._reported:
            call_id = self._new_call_id()
            self.events.append(ToolCallStart(index=self.num_calls - 1, call_id=call_id, name=self._name))
        held, self._held = self._held, ""
        return held

    def _write_arguments(self, text: str) -> None:
        if text and self._reported:
            self.events.append(ToolCallArguments(index=self.num_calls - 1, text=text))

    @property
    def _reported(self) -> bool:
        return self._parallel or self.num_calls == 1


class ContentReader:
    """Content of one answer whose calls are not looked for."""

    num_calls = 0

    def push(self, text: str, *, complete: bool, cut: bool = False) -> list[AnswerEvent]:
        """Return what the next piece adds. See ToolCallReader."""
        del complete, cut
        return [ContentText(text=text)] if text else []


class ToolCallReader:
    """Content and tool calls of one answer."""

    def __init__(self, parser: ToolParser, declared: Mapping[str, Schema], *, parallel: bool) -> None:
        self._parser = parser
        self._cursor = TextCursor()
        self._calls = CallWriter(declared, parser.new_call_id, parallel=parallel)
        self._cut = False
        self._reading = self._read()

    def push(self, text: str, *, complete: bool, cut: bool = False) -> list[AnswerEvent]:
        """Return what the next piece adds. complete: it is the last. cut: the answer's length ends it."""
        self._cut = cut
        self._cursor.push(text, complete=complete)
        next(self._reading, None)
        events, self._calls.events = self._calls.events, []
        return events

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return self._calls.num_calls

    def _read(self) -> Reading[None]:
        cursor, parser = self._cursor, self._parser
        mark: str | None = None
        if parser.openings:
            yield from cursor.skip_spaces()
            if (yield from cursor.peek()) in tuple(parser.openings):
                mark = yield from self._read_calls("")
        while True:
            if mark is None:
                mark = yield from cursor.copy_until(
                    parser.marks, self._calls.content, trailing=None, unfinished=self._no_call
                )
            if mark is None:
                return
            mark = yield from self._read_calls(mark)

    def _read_calls(self, mark: str) -> Reading[str | None]:
        """Read what follows a mark; empty at an opening. The mark of another call if that was read as well."""
        cursor, calls, found = self._cursor, self._calls, None
        num_calls = calls.num_calls
        before = cursor.since_mark().removesuffix(mark)
        try:
            yield from self._parser.read_calls(mark, cursor, calls)
            cursor.mark()
        except NotACall:
            if cursor.exhausted:  # what is left unread is the beginning of a tag
                cursor.take_arrived()
            if not calls.keep_unfinished(cut=self._cut and cursor.exhausted):
                text = cursor.since_mark()
                if calls.num_calls > num_calls:  # it follows a complete call
                    calls.separate(before)
                    calls.separate(text[: len(text) - len(text.lstrip())])
                    text = text.lstrip()
                self._no_call(text)
                cursor.mark()
                return None
            cursor.mark()
            ends = (*self._parser.marks, *self._parser.ends)
            found = yield from cursor.copy_until(ends, calls.malformed, trailing=None, unfinished=_ignore)
        calls.separate(before)
        if found in self._parser.marks:
            return found
        cursor.mark()
        yield from cursor.skip_spaces()
        calls.separate(cursor.since_mark())
        cursor.mark()
        return None

    def _no_call(self, text: str) -> None:
        """Take text that may begin a call and does not: content, or markup at the cut of an answer with calls."""
        if not (self._cut and self._cursor.exhausted and self._calls.num_calls):
            self._calls.content(text)


def _ignore(_: str) -> None:
    """Leave out a text."""


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
