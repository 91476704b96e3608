"""TextCursor: reads a text that arrives piece by piece, for parsers that are written as if it were all there.

A parser is a generator: it yields where it needs text that has not arrived, and is resumed when there is more. It
sees one character after the other, so how the text is divided into pieces makes no difference to it.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

_T = TypeVar("_T")

Reading = Generator[None, None, _T]

END = ""  # what peek returns after the last character

_SPACES = re.compile(r"\s+")


class TextCursor:
    """A position in a text. Text before the mark is forgotten."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._marked = 0
        self.complete = False
        self.pinned = False  # whether the mark stays where it is
        self.exhausted = False  # whether a reader needed more than there was when the text had ended

    def push(self, text: str, *, complete: bool) -> None:
        """Add the next piece. complete: it is the last."""
        self._text = self._text[self._marked :] + text
        self._at -= self._marked
        self._marked = 0
        self.complete = complete

    def mark(self) -> None:
        """Remember this position, for since_mark, unless the mark is pinned."""
        if not self.pinned:
            self._marked = self._at

    def since_mark(self) -> str:
        return self._text[self._marked : self._at]

    @property
    def offset(self) -> int:
        """The position, counted from the mark."""
        return self._at - self._marked

    def rewind(self, offset: int = 0) -> None:
        """Return to an earlier position, counted from the mark."""
        self._at = self._marked + offset

    def take_arrived(self) -> str:
        """The rest of the text that has arrived."""
        rest, self._at = self._text[self._at :], len(self._text)
        return rest

    def peek(self) -> Reading[str]:
        """The next character, which stays there; END at the end of the text."""
        while self._at == len(self._text):
            if self.complete:
                self.exhausted = True
                return END
            yield
        return self._text[self._at]

    def take(self) -> Reading[str]:
        """The next character; END at the end of the text."""
        char = yield from self.peek()
        self._at += len(char)
        return char

    def starts_with(self, literal: str) -> Reading[bool]:
        """Return whether the literal comes next. Waits for more text only while that is open."""
        while True:
            there = self._text[self._at : self._at + len(literal)]
            if there == literal:
                return True
            if not literal.startswith(there):
                return False
            if self.complete:
                self.exhausted = True
                return False
            yield

    def accept_cut(self, literal: str) -> Reading[bool]:
        """Go past the literal, or past as much of it as there is at the end of the text."""
        found = yield from self.accept(literal)
        if not found and self.complete and literal.startswith(self._text[self._at :]):
            self._at = len(self._text)
        return found

    def accept(self, literal: str) -> Reading[bool]:
        """The same, and go past the literal."""
        found = yield from self.starts_with(literal)
        if found:
            self._at += len(literal)
        return found

    def take_run(self, pattern: re.Pattern[str]) -> str:
        """The part that matches, of the text that has arrived; may be empty, and the match may go on later.

        pattern: one class of characters, repeated, so that matches of pieces join to the match of the whole.
        """
        found = pattern.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return found.group()

    def skip_spaces(self) -> Reading[None]:
        while (yield from self.peek()).isspace():
            self.take_run(_SPACES)

    def skip(self, num_chars: int) -> None:
        """Go past characters that have been peeked at."""
        self._at += num_chars
        assert self._at <= len(self._text)

    def copy_until(
        self,
        marks: tuple[str, ...],
        sink: Callable[[str], None],
        *,
        trailing: str | None,
        unfinished: Callable[[str], None] | None = None,
    ) -> Reading[str | None]:
        """Pass text on from the mark up to the first of marks, and go past that; None: the text ended first.

        trailing: characters that are not passed on if nothing but them stands before the mark, as of str.rstrip;
        None: whitespace. They lie behind the mark then. unfinished: gets the beginning of a mark that the text
        ends with, and what is held before that; without it, sink does.
        """
        while True:
            held = self._text[self._marked :]
            mark = _first_of(marks, held)
            if mark is not None:
                at = held.index(mark)
                self._pass_on(len(held[:at].rstrip(trailing)), sink)
                self._at = self._text.index(mark, self._marked) + len(mark)
                return mark
            begun = _begun(marks, held)
            if self.complete and (begun == 0 or unfinished is None):
                self._pass_on(len(held), sink)
                return None
            self._pass_on(len(held[: len(held) - begun].rstrip(trailing)), sink)
            if self.complete and unfinished is not None:
                self.exhausted = True
                self._pass_on(len(self._text) - self._marked, unfinished)
                return None
            yield

    def _pass_on(self, num_chars: int, sink: Callable[[str], None]) -> None:
        if num_chars:
            sink(self._text[self._marked : self._marked + num_chars])
        self._marked += num_chars
        self._at = max(self._at, self._marked)


def _first_of(marks: tuple[str, ...], text: str) -> str | None:
    """The mark that comes first in the text; None: the text has none."""
    return min((each for each in marks if each in text), key=text.index, default=None)


def _begun(marks: tuple[str, ...], text: str) -> int:
    """Length of the longest end of the text that a mark begins with."""
    longest = min(len(text), max(map(len, marks), default=1) - 1)
    ends = (text[len(text) - size :] for size in range(longest, 0, -1))
    return next((len(end) for end in ends if any(each.startswith(end) for each in marks)), 0)
