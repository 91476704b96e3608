"""ReasoningParser: divides an answer into reasoning and the answer proper. ThinkParser reads <think>."""

from typing import Protocol

from faser.api.parsing.events import AnswerEvent, ContentText, ReasoningText
from faser.api.parsing.text_cursor import Reading, TextCursor
from faser.engine.text.tokenizer import Tokenizer

THINK, END_THINK = "<think>", "</think>"


class ReasoningParser(Protocol):
    """The reasoning of one answer."""

    def push(self, text: str, *, complete: bool) -> list[AnswerEvent]:
        """What the next piece adds: ReasoningText, then ContentText. complete: it is the last piece."""
        ...


class ThinkParser:
    """Reasoning between <think> and </think>, at the beginning of an answer.

    Line ends next to the marks belong to the format. An answer that ends within its reasoning has no content.
    """

    def __init__(self, *, open_at_start: bool) -> None:
        """open_at_start: the answer begins within its reasoning, with or without a mark."""
        self._open = open_at_start
        self._cursor = TextCursor()
        self._events: list[AnswerEvent] = []
        self._reading = self._read()

    def push(self, text: str, *, complete: bool) -> list[AnswerEvent]:
        self._cursor.push(text, complete=complete)
        next(self._reading, None)
        events, self._events = self._events, []
        return events

    def _read(self) -> Reading[None]:
        cursor = self._cursor
        yield from cursor.skip_spaces()
        if (yield from cursor.accept(THINK)) or self._open:
            yield from self._skip_line_ends()
            if (yield from cursor.copy_until((END_THINK,), self._reasoning, trailing="\n")) is None:
                return
            yield from self._skip_line_ends()
        yield from cursor.copy_until((), self._content, trailing="")

    def _skip_line_ends(self) -> Reading[None]:
        while (yield from self._cursor.accept("\n")):
            pass
        self._cursor.mark()

    def _reasoning(self, text: str) -> None:
        self._events.append(ReasoningText(text=text))

    def _content(self, text: str) -> None:
        self._events.append(ContentText(text=text))


def begins_within(prompt: str) -> bool | None:
    """Whether an answer to a prompt begins within its reasoning; None: the answer itself says it."""
    end = prompt.rstrip()
    if end.endswith(END_THINK):
        return False
    return True if end.endswith(THINK) else None


class ReasoningTokens:
    """Counts the tokens of one answer's reasoning, marks included.

    The reasoning may end in the middle of what one step adds, for a step can add several tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, open_at_start: bool) -> None:
        self._tokenizer = tokenizer
        self._open = open_at_start
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
            self._open = self._end.startswith(THINK.encode())
            self._over = not THINK.encode().startswith(self._end[: len(THINK)])
        if self._open:
            self._over = END_THINK.encode() in self._end
            self._end = self._end[-len(END_THINK) :]
