"""Text that finds where its current context occurred before, and the bounded corpus of past outputs.

Owns tokens and, for contexts of a few lengths (the anchors), a chain from each position to the previous one with
the same context, as Lempel-Ziv compressors have it: a token is indexed and forgotten in constant time, where a
tree of suffixes would touch a node per depth. A position is where a continuation begins, right after its context.

    tokens      … a b c [d] … a b c [d] … a b c |        the context a b c ends the text and occurred twice
    chain                 ↑__________|  ↑_______ latest

Memory: about 110 bytes a token and anchor.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ANCHORS = (5, 2)  # longest first: a long context finds the few occurrences worth comparing
NOWHERE = -1  # before every position
END = -1  # follows each text of a corpus; not a token id
SHORTEST_OUTPUT = 8  # tokens; shorter outputs hold nothing that a request would repeat
COMPACT_ABOVE = 4096  # forgotten tokens are cut off in pieces no smaller than this


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Occurrences of the longest context found. starts: indices into the text's tokens, the latest first."""

    length: int
    starts: list[int]


class Text:
    """Tokens that grow at the end, and are forgotten at the front if at all.

    tokens begins at position num_dropped. Callers may read it, and extend it while a draft is made. oldest:
    position of the oldest text not forgotten.
    """

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self.tokens = list(token_ids)
        self.num_dropped = 0
        self.oldest = 0
        self._latest: tuple[dict[int, int], ...] = tuple({} for _ in ANCHORS)
        self._previous: tuple[list[int], ...] = tuple([] for _ in ANCHORS)

    @property
    def end(self) -> int:
        """Position of the next token."""
        return self.num_dropped + len(self.tokens)

    def index(self, *, begin: int = 0, salt: int = 0) -> None:
        """Make appended tokens findable up to the last one, which has no continuation yet.

        begin: where the newest text begins; no context starts before it.
        salt: a context is found only by a lookup with the same salt.
        """
        for anchor, latest, previous in zip(ANCHORS, self._latest, self._previous, strict=True):
            position = self.num_dropped + len(previous)
            if (short := min(begin + anchor, self.end) - position) > 0:  # too near the beginning for this anchor
                previous.extend([NOWHERE] * short)
                position += short
            for key in self.keys(anchor, position, self.end, salt):
                previous.append(latest.get(key, NOWHERE))
                latest[key] = position
                position += 1

    def close(self) -> None:
        """End the newest text: an END follows it."""
        self.tokens.append(END)
        for previous in self._previous:
            previous.extend([NOWHERE] * (len(self.tokens) - len(previous)))

    def forget(self, num_tokens: int, *, salt: int) -> None:
        """Drop the oldest text, of num_tokens and its END."""
        end = self.oldest + num_tokens + 1
        for anchor, latest in zip(ANCHORS, self._latest, strict=True):
            for key in self.keys(anchor, self.oldest + anchor, end - 1, salt):
                if latest.get(key, end) < end:
                    del latest[key]
        self.oldest = end
        forgotten = end - self.num_dropped
        if forgotten > max(COMPACT_ABOVE, len(self.tokens) // 2):
            del self.tokens[:forgotten]
            for previous in self._previous:
                del previous[:forgotten]
            self.num_dropped = end

    def find(self, tail: list[int], *, most: int, salt: int = 0) -> Match | None:
        """Where the longest suffix of tail occurred, among the `most` latest occurrences of its longest anchor.

        tail: the last tokens of a text, which may be this one. Returns None if not even the shortest anchor
        occurred. Tokens appended since the last `index` are scanned.
        """
        for anchor, latest, previous in zip(ANCHORS, self._latest, self._previous, strict=True):
            if anchor > len(tail):
                continue
            context = tail[-anchor:]
            is_indexed = len(previous) == len(self.tokens)
            starts = [] if is_indexed else self._scan(context, len(previous), most)
            position = latest.get(hash(tuple(context)) ^ salt, NOWHERE)
            while position >= self.oldest and len(starts) < most:
                starts.append(position - self.num_dropped)
                position = previous[starts[-1]]
            if (match := self._longest(tail, starts, anchor)) is not None:
                return match
        return None

    def _scan(self, context: list[int], first: int, most: int) -> list[int]:
        """Indices from `first` on, the latest first, that come right after this context."""
        anchor = len(context)
        latest_first = range(len(self.tokens) - 1, max(anchor, first) - 1, -1)
        starts = [start for start in latest_first if self.tokens[start - anchor : start] == context]
        return starts[:most]

    def _longest(self, tail: list[int], starts: list[int], length: int) -> Match | None:
        """The starts whose context agrees with tail over the most tokens, and over at least `length`."""
        tokens = self.tokens
        found: list[int] = []
        for start in starts:
            if tokens[start - length : start] != tail[-length:]:
                continue
            longer = length
            while longer < min(len(tail), start) and tokens[start - longer - 1] == tail[-longer - 1]:
                longer += 1
            if longer > length:
                length = longer
                found.clear()
            found.append(start)
        return Match(length=length, starts=found) if found else None

    def findable(self) -> list[set[int]]:
        """Keys of the contexts that a lookup could find, by anchor."""
        return [set(latest) for latest in self._latest]

    def check_invariants(self) -> None:
        """Chains lead backwards and, as far as their text is remembered, through equal contexts."""
        for anchor, latest, previous in zip(ANCHORS, self._latest, self._previous, strict=True):
            assert all(self.oldest <= position < self.end for position in latest.values())
            for index, position in enumerate(previous):
                assert position < self.num_dropped + index
                if position >= self.oldest:
                    before = position - self.num_dropped
                    assert self.tokens[before - anchor : before] == self.tokens[index - anchor : index]

    def keys(self, anchor: int, begin: int, end: int, salt: int) -> list[int]:
        """Keys of the contexts before the positions begin … end - 1. Different contexts may have equal keys."""
        if begin >= end:
            return []
        recent = tuple(self.tokens[begin - anchor - self.num_dropped : end - 1 - self.num_dropped])
        return [hash(recent[first : first + anchor]) ^ salt for first in range(end - begin)]


class Corpus:
    """Outputs of finished sequences, the oldest forgotten first, never more than max_tokens nor max_outputs.

    A forgotten output leaves no trace: every count is that of the outputs held.
    """

    def __init__(self, *, max_tokens: int, max_outputs: int) -> None:
        self.text = Text()
        self._max_tokens = max_tokens
        self._max_outputs = max_outputs
        self._outputs: deque[tuple[int, int]] = deque()  # tokens without END, salt
        self.num_tokens = 0

    def add(self, token_ids: Sequence[int], *, salt: int = 0) -> None:
        """Remember an output, or its end if it is longer than the corpus."""
        num_tokens = min(len(token_ids), self._max_tokens)
        if num_tokens < SHORTEST_OUTPUT or self._max_outputs == 0:
            return
        while self.num_tokens + num_tokens > self._max_tokens or len(self._outputs) == self._max_outputs:
            self._forget_oldest()
        begin = self.text.end
        self.text.tokens.extend(token_ids[-num_tokens:])
        self.text.index(begin=begin, salt=salt)
        self.text.close()
        self._outputs.append((num_tokens, salt))
        self.num_tokens += num_tokens

    def _forget_oldest(self) -> None:
        num_tokens, salt = self._outputs.popleft()
        self.text.forget(num_tokens, salt=salt)
        self.num_tokens -= num_tokens

    def check_invariants(self) -> None:
        """Every number can be restated from the outputs held; findable is exactly what they hold."""
        lengths = [num_tokens for num_tokens, _ in self._outputs]
        assert self.num_tokens == sum(lengths) <= self._max_tokens
        assert len(lengths) <= self._max_outputs
        assert self.text.end == self.text.oldest + sum(lengths) + len(lengths)
        begin = self.text.oldest
        findable: list[set[int]] = [set() for _ in ANCHORS]
        for num_tokens, salt in self._outputs:
            for anchor, keys in zip(ANCHORS, findable, strict=True):
                keys.update(self.text.keys(anchor, begin + anchor, begin + num_tokens, salt))
            begin += num_tokens + 1
        assert findable == self.text.findable()
        self.text.check_invariants()
