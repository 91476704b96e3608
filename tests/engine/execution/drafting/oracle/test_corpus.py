"""Finding contexts in text, and the bounds of the corpus. Oracle: comparison at every position of every text."""

import random
from collections import deque

import pytest

from tests.engine.execution.drafting.oracle.corpus import ANCHORS, END, SHORTEST_OUTPUT, Corpus, Match, Text

MOST = 5
TOKENS, OUTPUTS = 300, 9


def compare_everywhere(texts: list[list[int]], tail: list[int]) -> tuple[int, list[list[int]]] | None:
    """Length of the longest context and what follows its occurrences, the latest text and position first."""
    for anchor in ANCHORS:
        if anchor > len(tail):
            continue
        everywhere = [
            (text, start)
            for text in reversed(texts)
            for start in range(len(text) - 1, anchor - 1, -1)
            if text[start - anchor : start] == tail[-anchor:]
        ][:MOST]
        if everywhere:
            lengths = [common_end(text[:start], tail) for text, start in everywhere]
            longest = max(lengths)
            return longest, [
                text[start:]
                for (text, start), length in zip(everywhere, lengths, strict=True)
                if length == longest
            ]
    return None


def common_end(one: list[int], other: list[int]) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[-length - 1] == other[-length - 1]:
        length += 1
    return length


def read(text: Text, match: Match | None) -> tuple[int, list[list[int]]] | None:
    """A match in the oracle's words."""
    if match is None:
        return None
    ends = [text.tokens.index(END, start) for start in match.starts]
    return match.length, [text.tokens[start:end] for start, end in zip(match.starts, ends, strict=True)]


@pytest.mark.parametrize("kinds", [1, 2, 5, 40])
def test_the_corpus_finds_what_comparing_everywhere_finds_and_nothing_forgotten(kinds: int) -> None:
    """Long enough that forgotten tokens are cut off several times; two salts."""
    rng = random.Random(kinds)
    corpus = Corpus(max_tokens=TOKENS, max_outputs=OUTPUTS)
    held: deque[tuple[list[int], int]] = deque()
    for _ in range(400):
        output, salt = [rng.randrange(kinds) for _ in range(rng.randrange(SHORTEST_OUTPUT, 90))], rng.randrange(2)
        corpus.add(output, salt=salt)
        held.append((output, salt))
        while sum(len(each) for each, _ in held) > TOKENS or len(held) > OUTPUTS:
            held.popleft()
        corpus.check_invariants()

        source = rng.choice(held)[0]
        cut = rng.randrange(len(source))
        tail = source[max(0, cut - rng.randrange(25)) : cut]
        texts = [each for each, of in held if of == salt]
        assert read(corpus.text, corpus.text.find(tail, most=MOST, salt=salt)) == compare_everywhere(texts, tail)
    assert corpus.text.num_dropped > 0


def test_after_forgetting_a_corpus_equals_one_that_never_knew() -> None:
    rng = random.Random(1)
    outputs = [[rng.randrange(3) for _ in range(40)] for _ in range(50)]
    old, new = (Corpus(max_tokens=200, max_outputs=100) for _ in range(2))
    for output in outputs:
        old.add(output)
    for output in outputs[-5:]:
        new.add(output)

    assert old.text.findable() == new.text.findable()
    for _ in range(200):
        tail = [rng.randrange(3) for _ in range(rng.randrange(12))]
        found = [read(each.text, each.text.find(tail, most=100)) for each in (old, new)]
        assert found[0] == found[1]


def test_memory_stays_bounded_however_many_outputs_come() -> None:
    corpus = Corpus(max_tokens=1000, max_outputs=10**6)
    for number in range(300):
        corpus.add(range(number, number + 100))

    assert corpus.num_tokens == 1000
    assert all(len(keys) <= 1000 for keys in corpus.text.findable())
    assert len(corpus.text.tokens) < 6000
    corpus.check_invariants()


def test_of_an_output_longer_than_the_corpus_the_end_is_remembered() -> None:
    corpus = Corpus(max_tokens=10, max_outputs=3)
    corpus.add(range(100))

    assert corpus.text.tokens == [*range(90, 100), END]
    corpus.check_invariants()


@pytest.mark.parametrize("max_tokens, max_outputs", [(0, 5), (100, 0), (SHORTEST_OUTPUT - 1, 5)])
def test_a_corpus_without_room_remembers_nothing(max_tokens: int, max_outputs: int) -> None:
    corpus = Corpus(max_tokens=max_tokens, max_outputs=max_outputs)
    corpus.add(range(50))

    assert corpus.text.tokens == []
    corpus.check_invariants()


def test_a_short_output_is_not_remembered() -> None:
    corpus = Corpus(max_tokens=100, max_outputs=3)
    corpus.add(range(SHORTEST_OUTPUT - 1))
    corpus.add(range(SHORTEST_OUTPUT))

    assert corpus.num_tokens == SHORTEST_OUTPUT


def test_no_context_reaches_from_one_output_into_the_next() -> None:
    corpus = Corpus(max_tokens=100, max_outputs=3)
    corpus.add(range(10))
    corpus.add(range(10, 20))

    assert corpus.text.find([8, 9], most=MOST) is None  # the output ended there
    assert corpus.text.find([9, 10], most=MOST) is None
    assert corpus.text.find([10, 11], most=MOST) == Match(length=2, starts=[13])
