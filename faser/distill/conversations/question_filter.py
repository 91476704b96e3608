"""QuestionFilter: which sampled questions are worth an answer. Knows no engine."""

import re
from collections import Counter
from collections.abc import Iterable

_MIN_CHARS = 8
_MIN_LETTERS = 0.5  # share of letters and spaces: lists of numbers and bars of signs have less
_MIN_NEW_WORDS = 0.35  # share of different words in a long question; loops have less
_LONG = 20  # words


class QuestionFilter:
    """Remembers what it has let pass. dropped: questions by the reason for which they were dropped."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self.dropped: Counter[str] = Counter()
        self._seen = {_key(each) for each in known}

    def takes(self, text: str, *, ended: bool) -> bool:
        """ended: the model ended the question by itself."""
        reason = self._problem(text, ended)
        if reason:
            self.dropped[reason] += 1
            return False
        self._seen.add(_key(text))
        return True

    def _problem(self, text: str, ended: bool) -> str:
        if not ended:
            return "too long"
        stripped = text.strip()
        if len(stripped) < _MIN_CHARS:
            return "empty"
        if "\ufffd" in stripped:
            return "degenerate"
        if sum(each.isalpha() or each.isspace() for each in stripped) < _MIN_LETTERS * len(stripped):
            return "degenerate"
        words = stripped.lower().split()
        if len(words) >= _LONG and len(set(words)) < _MIN_NEW_WORDS * len(words):
            return "degenerate"
        return "duplicate" if _key(stripped) in self._seen else ""


def _key(text: str) -> str:
    """Equal for questions that differ in case, spaces and signs only."""
    return " ".join(re.findall(r"\w+", text.lower()))
