"""Masks allow exactly the tokens that can follow, along drafts too, and asking moves no matcher.

Oracle: finite languages whose texts are written out; a token may follow where its bytes lead to the beginning of a
text. Where the text leaves no choice, llguidance allows the tokenizer's own division of it and no other one. Bugs
these tests have been seen to catch: a rollback by one token too many or by none, the mask of another row, ends
not held back.
"""

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from faser.engine.structure.sequence_matchers import SequenceMatchers
from faser.engine.text.tokenizer import Tokenizer
from faser.types.sampling import StructuredOutput, StructureKind
from tests.checkpoints import VOCAB_SIZE
from tests.engine.structure.languages import EOS, LANGUAGES, Language, the_compiler, the_tokenizer

PATIENCE_S = 60.0  # a busy machine makes no sequence wait for its mask


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return the_tokenizer()


def the_matchers(*asked: StructuredOutput, vocab_size: int = VOCAB_SIZE) -> SequenceMatchers:
    """Slot i has what is asked for at place i."""
    matchers = SequenceMatchers(the_compiler(vocab_size=vocab_size), num_threads=2, patience_s=PATIENCE_S)
    for slot, each in enumerate(asked):
        matchers.start(slot, each, ())
    return matchers


def masked(
    matchers: SequenceMatchers, drafts: Sequence[tuple[int, tuple[int, ...]]], positions: Sequence[int]
) -> NDArray[np.int64]:
    """The masks of all rows, none of which takes long."""
    words, without_token = matchers.masks(drafts, positions)
    assert not without_token
    return words


def ids(words: NDArray[np.int64]) -> set[int]:
    """The tokens that a row allows."""
    return {*np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()}


def expected(language: Language, tokenizer: Tokenizer, before: Sequence[int]) -> set[int]:
    """What the mask after these tokens has to be: all that may follow, or the first of the forced ones."""
    allowed = language.allowed(tokenizer, before)
    matchers = SequenceMatchers(the_compiler(), num_threads=1, patience_s=PATIENCE_S)
    matchers.start(0, language.asked, before)
    forced = matchers.forced(0, (), 1)
    assert allowed.issuperset(forced)
    return {*forced} or allowed


def walk(language: Language, tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Random tokens of a text of the language, the end included; rarely the longest token, often a byte."""
    found: list[int] = []
    while not found or found[-1] != EOS:
        found.append(rng.choice(sorted(language.allowed(tokenizer, found))))
    return found


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_mask_allows_what_can_follow(name: str, tokenizer: Tokenizer) -> None:
    language, rng = LANGUAGES[name], random.Random(1)
    for _ in range(12):
        matchers = the_matchers(language.asked)
        token_ids = walk(language, tokenizer, rng)
        for i, token_id in enumerate(token_ids):
            (row,) = masked(matchers, [(0, ())], [i])
            assert ids(row) == expected(language, tokenizer, token_ids[:i])
            matchers.accept(0, token_id)


@pytest.mark.parametrize("name", LANGUAGES)
def test_rows_of_drafts_are_masked_as_if_the_draft_were_known(name: str, tokenizer: Tokenizer) -> None:
    """Three sequences at different places, with drafts of different lengths, some of which go wrong."""
    language, rng = LANGUAGES[name], random.Random(2)
    matchers = the_matchers(*[language.asked] * 3)
    texts = [walk(language, tokenizer, rng) for _ in range(3)]
    known = [0, 0, 0]
    for _ in range(40):
        drafts = []
        for slot, text in enumerate(texts):
            continuation = text[known[slot] : known[slot] + rng.randrange(6)]
            if continuation and rng.random() < 0.3:
                continuation[rng.randrange(len(continuation))] = rng.randrange(VOCAB_SIZE)
            drafts.append((slot, tuple(continuation)))
        rows = iter(masked(matchers, drafts, known))
        for slot, draft in drafts:
            before, right = texts[slot][: known[slot]], 0
            for count in range(len(draft) + 1):
                row = ids(next(rows))
                if right == count:
                    assert row == expected(language, tokenizer, [*before, *draft[:count]])
                    if count < len(draft) and draft[count] in row and draft[count] != EOS:
                        right += 1
            assert matchers.num_allowed(slot, draft) >= right
        for slot, text in enumerate(texts):
            taken = rng.randrange(3)
            for token_id in text[known[slot] : min(known[slot] + taken, len(text) - 1)]:
                matchers.accept(slot, token_id)
                known[slot] += 1


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_draft_is_allowed_as_far_as_each_of_its_tokens_may_follow(name: str, tokenizer: Tokenizer) -> None:
    """By the masks where the grammar may be ambiguous: a token that no mask allows is refused for certain."""
    language, rng = LANGUAGES[name], random.Random(3)
    matchers = the_matchers(language.asked)
    may_follow = (
        expected
        if language.asked.kind in (StructureKind.GRAMMAR, StructureKind.STRUCTURAL_TAG)
        else Language.allowed
    )
    for _ in range(40):
        draft = walk(language, tokenizer, rng)
        if rng.random() < 0.7:
            draft[rng.randrange(len(draft))] = rng.randrange(VOCAB_SIZE)
        count = 0
        while count < len(draft) and draft[count] in may_follow(language, tokenizer, draft[:count]):
            count += 1
            if draft[count - 1] == EOS:
                break
        assert matchers.num_allowed(0, draft[: count + 1]) == count


@pytest.mark.parametrize("name", LANGUAGES)
def test_forced_tokens_are_the_only_text_that_can_follow(name: str, tokenizer: Tokenizer) -> None:
    """And asking for them, after draft tokens or not, changes nothing."""
    language, rng = LANGUAGES[name], random.Random(4)
    num_forced = 0
    for _ in range(12):
        matchers, text = the_matchers(language.asked), walk(language, tokenizer, rng)
        for i, token_id in enumerate(text[:-1]):
            after = text[i : i + rng.randrange(3)]
            after = after[: after.index(EOS)] if EOS in after else after
            forced = matchers.forced(0, after, 8)
            num_forced += len(forced)
            before = b"".join(map(tokenizer.token_bytes, [*text[:i], *after]))
            left = [each for each in language.texts if each.startswith(before)]
            said = before + b"".join(tokenizer.token_bytes(each) for each in forced if each != EOS)
            assert all(each.startswith(said) for each in left)
            assert EOS not in forced or left == [said]
            assert EOS not in forced[:-1]
            assert forced[:2] == matchers.forced(0, after, 2)
            assert ids(masked(matchers, [(0, ())], [i])[0]) == expected(language, tokenizer, text[:i])
            matchers.accept(0, token_id)
    assert num_forced > 0


def test_forced_tokens_end_before_one_that_the_model_lacks() -> None:
    """A tokenizer may have tokens beyond the model's embedding."""
    asked = StructuredOutput(kind=StructureKind.REGEX, text="some words")
    whole = the_matchers(asked).forced(0, (), 99)
    largest = max(whole)
    assert whole.index(largest) > 0
    assert the_matchers(asked, vocab_size=largest).forced(0, (), 99) == whole[: whole.index(largest)]


def test_a_key_is_forced_with_the_text_around_it(tokenizer: Tokenizer) -> None:
    matchers = the_matchers(LANGUAGES["schema"].asked)
    assert tokenizer.decode(matchers.forced(0, (), 32)).startswith('{"kind')


def test_output_that_is_known_at_the_start_counts(tokenizer: Tokenizer) -> None:
    """As after a preemption."""
    language = LANGUAGES["schema"]
    text = walk(language, tokenizer, random.Random(5))
    for count in range(len(text)):
        matchers = the_matchers()
        matchers.start(3, language.asked, text[:count])
        assert ids(masked(matchers, [(3, ())], [0])[0]) == expected(language, tokenizer, text[:count])
        matchers.release(3)
        assert not matchers.slots


def test_sequences_that_share_a_grammar_do_not_share_their_places(tokenizer: Tokenizer) -> None:
    language = LANGUAGES["choice"]
    matchers = the_matchers(language.asked, language.asked)
    first = tokenizer.encode("the")[0]
    matchers.accept(0, first)
    rows = masked(matchers, [(1, ()), (0, ())], [0, 1])
    assert [ids(row) for row in rows] == [expected(language, tokenizer, after) for after in ((), (first,))]


@pytest.mark.parametrize("may_end_from", [0, 3, 5, math.inf])
def test_an_answer_ends_early_only_if_nothing_else_is_allowed(may_end_from: float, tokenizer: Tokenizer) -> None:
    """ "a" to "aaaa" one by one: it may end after each, and has to after the last."""
    asked = StructuredOutput(kind=StructureKind.REGEX, text="a{1,4}")
    (letter,) = tokenizer.encode("a")
    matchers = SequenceMatchers(the_compiler(), num_threads=1, patience_s=PATIENCE_S)
    matchers.start(0, asked, (), may_end_from=may_end_from)
    rows = masked(matchers, [(0, (letter,) * 4)], [0])
    may_end = [EOS in ids(row) for row in rows]
    assert may_end == [i == 4 or (i > 0 and i >= may_end_from) for i in range(5)]
    assert [letter in ids(row) for row in rows] == [True] * 4 + [False]


def test_a_vocabulary_larger_than_the_tokenizers_is_masked_to_its_end() -> None:
    (row,) = masked(the_matchers(LANGUAGES["choice"].asked, vocab_size=1000), [(0, ())], [0])
    assert len(row) * 64 >= 1000
    assert max(ids(row)) < VOCAB_SIZE


def test_a_token_that_is_forbidden_leaves_none() -> None:
    """The sequence then ends with an error, and no other one does."""
    asked = LANGUAGES["choice"].asked
    matchers = the_matchers(asked, asked)
    matchers.accept(0, next(i for i in itertools.count(3) if i not in ids(masked(matchers, [(0, ())], [0])[0])))
    rows = masked(matchers, [(0, ()), (1, ())], [1, 0])
    assert not ids(rows[0])
    assert ids(rows[1])
