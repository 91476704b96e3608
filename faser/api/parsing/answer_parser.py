"""AnswerParser: the events of one answer, from its text as it arrives. Reasoning first, then content and calls."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from faser.api.parsing.events import AnswerEvent, ContentText, ReasoningText, ToolCallArguments, ToolCallEnd
from faser.api.parsing.harmony import HarmonyParser, HarmonyTokens, opening_of
from faser.api.parsing.text_cursor import Reading, TextCursor
from faser.api.parsing.tool_parser import NO_CALLS, ContentReader, Schema, ToolCallReader, ToolParser
from faser.engine.text.tokenizer import Tokenizer
from faser.optional import maybe

THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkMarks:
    """The texts around the reasoning of an answer.

    label: follows the first mark, and begins the reasoning where a model leaves that mark out. drops_stray_ends:
    end marks in the content, which have no beginning, are left out.
    """

    begin: str = THINK
    end: str = END_THINK
    label: str = ""
    drops_stray_ends: bool = False

    def begins_within(self, prompt: str) -> bool | None:
        """Return whether an answer to the prompt begins within its reasoning; None: the answer itself says it."""
        end = prompt.rstrip()
        if end.endswith(self.end):
            return False
        return True if end.endswith((self.begin, self.begin + self.label.rstrip())) else None

    @property
    def beginnings(self) -> tuple[str, ...]:
        """The texts that may begin the reasoning."""
        return (self.begin, self.label) if self.label else (self.begin,)


THINK_MARKS = ThinkMarks()


class ThinkParser:
    """Reasoning between two marks, at the beginning of an answer.

    Line ends next to the marks belong to the format. An answer that ends within its reasoning has no content but
    complete calls at its end: some models forget to close their reasoning before they call. Calls that something
    follows, if only the end of the reasoning, are drafts.
    """

    def __init__(
        self,
        *,
        open_at_start: bool,
        marks: ThinkMarks = THINK_MARKS,
        call_marks: tuple[str, ...] = (),
        new_reader: Callable[[], ToolCallReader | ContentReader] = ContentReader,
    ) -> None:
        """open_at_start: the answer begins within its reasoning, with or without a mark.

        call_marks: where calls may begin. new_reader: makes a reader of them.
        """
        self._open = open_at_start
        self._marks = marks
        self._call_marks = call_marks
        self._new_reader = new_reader
        self._cut = False
        self._cursor = TextCursor()
        self._events: list[AnswerEvent] = []
        self._reading = self._read()

    def push(self, text: str, *, complete: bool, cut: bool = False) -> list[AnswerEvent]:
        """Return what the next piece adds: ReasoningText, then ContentText. complete: it is the last piece.

        cut: the answer's length ends it.
        """
        self._cut = cut
        self._cursor.push(text, complete=complete)
        next(self._reading, None)
        events, self._events = self._events, []
        return events

    def _read(self) -> Reading[None]:
        cursor, marks = self._cursor, self._marks
        yield from cursor.skip_spaces()
        begins = yield from cursor.accept(marks.begin)
        accept = cursor.accept_cut if begins else cursor.accept
        if (marks.label and (yield from accept(marks.label))) or begins or self._open:
            yield from self._skip_line_ends()
            if not (yield from self._read_reasoning()):
                return
        yield from cursor.copy_until((), self._content, trailing="")

    def _read_reasoning(self) -> Reading[bool]:
        """The reasoning up to its end, or to calls that end the answer. False: the answer ends within it."""
        cursor = self._cursor
        while True:
            marks = (self._marks.end, *self._call_marks)
            mark = yield from cursor.copy_until(
                marks, self._reasoning, trailing="\n", unfinished=self._unfinished_mark
            )
            if mark is None:
                return False
            if mark == self._marks.end:
                yield from self._skip_line_ends()
                return True
            if (yield from self._calls_follow(mark)):
                return True
            self._reasoning(cursor.since_mark())
            cursor.mark()

    def _calls_follow(self, mark: str) -> Reading[bool]:
        """Return whether nothing but complete calls follows a mark. Leaves the cursor behind the mark."""
        reader, cursor, offset = self._new_reader(), self._cursor, self._cursor.offset
        text, tail, num_complete, is_draft = mark, "", 0, False
        while True:
            arrived = cursor.take_arrived()
            events = reader.push(text + arrived, complete=cursor.complete)
            num_complete += sum(isinstance(each, ToolCallEnd) for each in events)
            is_draft = any(isinstance(each, ContentText) for each in events)
            tail += arrived
            if is_draft or self._marks.end in tail or cursor.complete:
                break
            text, tail = "", tail[1 - len(self._marks.end) :]
            yield
        cursor.rewind(offset)
        if not is_draft:
            self._call_marks = ()  # the reasoning, or the answer, ends in what looks like calls: look no further
        return not is_draft and self._marks.end not in tail and not self._cut and reader.num_calls == num_complete

    def _skip_line_ends(self) -> Reading[None]:
        while (yield from self._cursor.accept("\n")):
            pass
        self._cursor.mark()

    def _unfinished_mark(self, text: str) -> None:
        if not self._cut:
            self._reasoning(text)

    def _reasoning(self, text: str) -> None:
        self._events.append(ReasoningText(text=text))

    def _content(self, text: str) -> None:
        self._events.append(ContentText(text=text))


class ReasoningTokens:
    """Counts the tokens of one answer's reasoning, marks included.

    The reasoning may end in the middle of what one step adds, for a step can add several tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, open_at_start: bool, marks: ThinkMarks = THINK_MARKS) -> None:
        self._tokenizer = tokenizer
        self._open = open_at_start
        self._beginnings = [each.encode() for each in marks.beginnings]
        self._mark = marks.end.encode()
        self._over = False
        self._end = b""  # of the bytes so far; before the reasoning has begun, all of them but for leading spaces
        self._count = 0

    @property
    def count(self) -> int:
        """Tokens so far."""
        return self._count if self._open else 0

    def take(self, token_ids: tuple[int, ...]) -> None:
        for token_id in token_ids:
            if self._over:
                return
            self._add(token_id)

    def _add(self, token_id: int) -> None:
        self._count += 1
        self._end += self._tokenizer.token_bytes(token_id)
        if not self._open:
            self._end = self._end.lstrip()
            self._open = self._end.startswith(tuple(self._beginnings))
            self._over = not any(each.startswith(self._end[: len(each)]) for each in self._beginnings)
        if self._open:
            self._over = self._mark in self._end
            self._end = self._end[-len(self._mark) :]


class _Omission:
    """Leaves every occurrence of a mark out of the content."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._cursor = TextCursor()
        self._cut = False
        self._kept: list[AnswerEvent] = []
        self._reading = self._read()

    def push(self, events: Sequence[AnswerEvent], *, complete: bool, cut: bool) -> list[AnswerEvent]:
        """Return the events without the mark. Content that may begin it is held back until that is known."""
        self._cut = cut
        for event in events:
            if isinstance(event, ContentText):
                self._cursor.push(event.text, complete=False)
                next(self._reading, None)
            else:
                self._kept.append(event)
        if complete:
            self._cursor.push("", complete=True)
            next(self._reading, None)
        kept, self._kept = self._kept, []
        return kept

    def _read(self) -> Reading[None]:
        cursor = self._cursor
        while (yield from cursor.copy_until((self._mark,), self._keep, trailing="", unfinished=self._keep_uncut)):
            cursor.mark()

    def _keep(self, text: str) -> None:
        self._kept.append(ContentText(text=text))

    def _keep_uncut(self, text: str) -> None:
        if not self._cut:
            self._keep(text)


class NoReasoning:
    """Stands in for the parser and the counter of reasoning where none is divided off: all is content."""

    count = 0

    def push(self, text: str, *, complete: bool, cut: bool = False) -> list[AnswerEvent]:
        """Return what the next piece adds. See ThinkParser."""
        del complete, cut
        return [ContentText(text=text)]

    def take(self, token_ids: tuple[int, ...]) -> None:
        """Count no token. See ReasoningTokens."""


NO_REASONING = NoReasoning()


class AnswerParser:
    """One answer. Without parsers, all of its text is content."""

    def __init__(
        self,
        reasoning: ThinkParser | HarmonyParser | NoReasoning = NO_REASONING,
        tool_calls: ToolCallReader | ContentReader | None = None,
        tokens: ReasoningTokens | HarmonyTokens | NoReasoning = NO_REASONING,
        *,
        shows_reasoning: bool = True,
        omitted: str | None = None,
    ) -> None:
        """tokens: counts those of the reasoning. shows_reasoning: otherwise the events leave it out.

        omitted: a text that is left out of the content.
        """
        self._reasoning = reasoning
        self._tool_calls = tool_calls or ContentReader()
        self._tokens = tokens
        self._shows_reasoning = shows_reasoning
        self._omission = maybe(_Omission, omitted)

    def push(
        self, text: str, token_ids: tuple[int, ...], *, complete: bool, cut: bool = False
    ) -> list[AnswerEvent]:
        """Return what one step adds. complete: it is the last of this answer. cut: the answer's length ends it.

        Texts that adjoin are one event.
        """
        self._tokens.take(token_ids)
        divided = self._reasoning.push(text, complete=complete, cut=cut)
        events: list[AnswerEvent] = [
            each for each in divided if isinstance(each, ReasoningText) and self._shows_reasoning
        ]
        content = "".join(each.text for each in divided if isinstance(each, ContentText))
        return _joined(events + self._content(content, complete=complete, cut=cut))

    @property
    def num_calls(self) -> int:
        """Tool calls so far."""
        return self._tool_calls.num_calls

    @property
    def num_reasoning_tokens(self) -> int:
        return self._tokens.count

    def _content(self, text: str, *, complete: bool, cut: bool) -> list[AnswerEvent]:
        events = self._tool_calls.push(text, complete=complete, cut=cut)
        return events if self._omission is None else self._omission.push(events, complete=complete, cut=cut)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerParsing:
    """Rules for parsing the answers to one request.

    reasoning: whether reasoning is divided off. marks: around it. always_reasons: answers begin within it, even if
    neither they nor the prompt have its mark. harmony: answers are in that format. shows_reasoning: the client
    wants to see it. tool_parser: NO_CALLS where they are not looked for. declared: the parameters' schema of each
    function that may be called. parallel: more than one call.
    """

    tokenizer: Tokenizer
    reasoning: bool = False
    marks: ThinkMarks = THINK_MARKS
    always_reasons: bool = False
    harmony: bool = False
    shows_reasoning: bool = True
    tool_parser: ToolParser = NO_CALLS
    declared: Mapping[str, Schema] = field(default_factory=dict)
    parallel: bool = True

    def start(self, prompt: str) -> AnswerParser:
        """The parser of one answer. prompt: its text ends where the answer begins."""
        tool_calls = self._new_reader()
        if self.harmony:
            opening = opening_of(prompt)
            return AnswerParser(
                HarmonyParser(opening=opening),
                tool_calls,
                HarmonyTokens(self.tokenizer, opening=opening),
                shows_reasoning=self.shows_reasoning,
            )
        within = self.marks.begins_within(prompt)
        if not self.reasoning or within is False:
            return AnswerParser(tool_calls=tool_calls)
        open_at_start = self.always_reasons or within is True
        return AnswerParser(
            ThinkParser(
                open_at_start=open_at_start,
                marks=self.marks,
                call_marks=self.tool_parser.marks,
                new_reader=self._new_reader,
            ),
            tool_calls,
            ReasoningTokens(self.tokenizer, open_at_start=open_at_start, marks=self.marks),
            shows_reasoning=self.shows_reasoning,
            omitted=self.marks.end if self.marks.drops_stray_ends else None,
        )

    def _new_reader(self) -> ToolCallReader | ContentReader:
        if self.tool_parser is NO_CALLS:
            return ContentReader()
        return ToolCallReader(self.tool_parser, self.declared, parallel=self.parallel)


def _joined(events: Sequence[AnswerEvent]) -> list[AnswerEvent]:
    """The events, with adjoining texts of one kind as one event."""
    joined: list[AnswerEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        match last, event:
            case ContentText(), ContentText():
                joined[-1] = ContentText(text=last.text + event.text)
            case ReasoningText(), ReasoningText():
                joined[-1] = ReasoningText(text=last.text + event.text)
            case ToolCallArguments(), ToolCallArguments() if last.index == event.index:
                joined[-1] = ToolCallArguments(index=event.index, text=last.text + event.text)
            case _:
                joined.append(event)
    return joined
