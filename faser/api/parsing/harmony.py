"""Harmony, the format of gpt-oss: an answer is a series of messages, each in a channel.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

Analysis is reasoning; final is content, and so is commentary without a recipient. The prompt ends with
<|start|>assistant, and generation stops at <|return|> and <|call|>. HarmonyParser divides an answer and leaves a
call as it is written; OpenAiParser reads it.

Source: the guide to the format, openai/openai-harmony, docs/format.md.
"""

import re
from collections.abc import Callable
from typing import ClassVar

from faser.api.parsing.events import AnswerEvent, ContentText, ReasoningText
from faser.api.parsing.json_formats import copy_value, skip_space
from faser.api.parsing.text_cursor import END, Reading, TextCursor
from faser.api.parsing.tool_parser import CallTag, CallWriter, NotACall, ToolParser
from faser.engine.text.tokenizer import Tokenizer

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{CHANNEL}final{MESSAGE}"
_FUNCTIONS = "functions."
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_LONGEST_HEADER = 512
_LONGEST_MARK = max(map(len, MARKS))


def opening_of(prompt: str) -> str:
    """Return the part of the prompt that begins the message the answer continues; empty: no message is open."""
    _, started, message = prompt.rpartition(START)
    return message if started and not any(end in message for end in ENDS) else ""


def recipient_of(header: str) -> str | None:
    """The function that a message calls; None: it calls none."""
    found = _RECIPIENT.search(header)
    return found[1].removeprefix(_FUNCTIONS) if found is not None and found[1].startswith(_FUNCTIONS) else None


def is_analysis(header: str) -> bool:
    return f"{CHANNEL}analysis" in header and recipient_of(header) is None


class HarmonyParser:
    """Reasoning and content of one answer. Texts of several messages are on lines of their own.

    Text that is in no message is content. A header that the answer ends within is left out.
    """

    def __init__(self, *, opening: str) -> None:
        """opening: see opening_of."""
        self._cursor = TextCursor()
        self._events: list[AnswerEvent] = []
        self._header = opening if MESSAGE in opening else None
        self._cut = False
        self._begins = False  # whether the next text is the first of its message
        self._seen: set[type[AnswerEvent]] = set()
        self._reading = self._read()

    def push(self, text: str, *, complete: bool, cut: bool = False) -> list[AnswerEvent]:
        """Return what the next piece adds: ReasoningText and ContentText. complete: it is the last piece.

        cut: the answer's length ends it; a mark at the cut is left out.
        """
        self._cut = cut
        self._cursor.push(text, complete=complete)
        next(self._reading, None)
        events, self._events = self._events, []
        return events

    def _read(self) -> Reading[None]:
        cursor, header = self._cursor, self._header
        while True:
            if header is None:
                header = yield from self._read_header()
            self._begins, calls = True, recipient_of(header) is not None
            if header and not calls:
                cursor.mark()
            sink = self._reasoning if is_analysis(header) else self._content
            end = yield from cursor.copy_until(ENDS, sink, trailing="", unfinished=self._unfinished_mark(sink))
            if end is None:
                return
            if calls:
                self._content(end)
            cursor.mark()
            header = None

    def _read_header(self) -> Reading[str]:
        """Empty: what comes next is no header; it has not been read then."""
        cursor = self._cursor
        for mark in (START, CHANNEL, MESSAGE, " to="):
            if (yield from cursor.starts_with(mark)):
                break
        else:
            self._leave_out_rest(only_cut=True)
            return ""
        try:
            return (yield from read_header(cursor))
        except NotACall:
            self._leave_out_rest()
            return ""

    def _leave_out_rest(self, *, only_cut: bool = False) -> None:
        """Leave out a header that the answer ends within."""
        if self._cursor.exhausted and (self._cut or not only_cut):
            self._cursor.take_arrived()
            self._cursor.mark()

    def _unfinished_mark(self, sink: Callable[[str], None]) -> Callable[[str], None]:
        return lambda text: None if self._cut else sink(text)

    def _reasoning(self, text: str) -> None:
        self._add(ReasoningText, text)

    def _content(self, text: str) -> None:
        self._add(ContentText, text)

    def _add(self, kind: type[ReasoningText] | type[ContentText], text: str) -> None:
        if self._begins and kind in self._seen:
            text = f"\n{text}"
        self._begins = False
        self._seen.add(kind)
        self._events.append(kind(text=text))


def read_header(cursor: TextCursor) -> Reading[str]:
    """A message's header, up to and with <|message|>. Raises NotACall at the first character that none has."""
    header = ""
    while True:
        for mark in (START, CHANNEL, CONSTRAIN, MESSAGE):
            if (yield from cursor.accept(mark)):
                header += mark
                break
        else:
            char = yield from cursor.peek()
            if char == END or not (char.isalnum() or char in " _.:/=-") or len(header) > _LONGEST_HEADER:
                raise NotACall
            cursor.skip(1)
            header += char
        if header.endswith(MESSAGE):
            return header


class HarmonyTokens:
    """Counts the tokens of one answer's analysis, headers and ends included."""

    def __init__(self, tokenizer: Tokenizer, *, opening: str) -> None:
        """opening: see opening_of."""
        self.count = 0
        self._tokenizer = tokenizer
        self._text = opening.encode()  # of the message so far; once it is known what it is, the last bytes of it
        self._pending = 0
        self._reasons = is_analysis(opening) if MESSAGE in opening else None

    def take(self, token_ids: tuple[int, ...]) -> None:
        for token_id in token_ids:
            self._text += self._tokenizer.token_bytes(token_id)
            self._pending += 1
            if self._reasons is None and MESSAGE.encode() in self._text:
                self._reasons = is_analysis(self._text.decode("utf-8", "replace"))
            elif self._reasons is None and len(self._text) > _LONGEST_HEADER:
                self._reasons = False
            if self._reasons is not None:
                self.count += self._pending if self._reasons else 0
                self._pending = 0
                self._text = self._text[-_LONGEST_MARK:]
            if any(end.encode() in self._text for end in ENDS):
                self._text, self._pending, self._reasons = b"", 0, None


class OpenAiParser(ToolParser):
    """A message to functions.NAME, whose body is a JSON object. An answer ends with the first, as a rule.

    A grammar has no text that ends a call: the end of the answer does.
    """

    marks: ClassVar[tuple[str, ...]] = (CHANNEL, START)
    ends: ClassVar[tuple[str, ...]] = ENDS
    inner_marks: ClassVar[tuple[str, ...]] = (CONSTRAIN, MESSAGE)
    tag: ClassVar[CallTag | None] = CallTag(
        trigger=None,
        begin=f"{CHANNEL}commentary to={_FUNCTIONS}NAME {CONSTRAIN}json{MESSAGE}",
        end="",
    )

    def read_calls(self, mark: str, cursor: TextCursor, calls: CallWriter) -> Reading[None]:
        name = recipient_of(mark + (yield from read_header(cursor)))
        if name is None:
            raise NotACall
        calls.start(name)
        yield from skip_space(cursor)
        if (yield from cursor.peek()) != "{":
            raise NotACall
        yield from copy_value(cursor, calls.arguments)
        calls.end()
        cursor.mark()
        yield from skip_space(cursor)
        for end in ENDS:
            if (yield from cursor.accept_cut(end)):
                return
