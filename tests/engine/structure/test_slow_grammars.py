"""Grammars that are ambiguous, and lexers at their limits: what they take from their own answer and from others.

Bugs these tests have been seen to catch: draft rows on the matcher itself, drafts again at once, a lexer at its
limit that stays in use or in the cache, steps that wait for slow masks, or for each question about drafts again.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits

from faser.engine.structure.compiler import GrammarCompiler
from faser.engine.structure.sequence_matchers import SequenceMatchers
from faser.engine.structure.trials import COSTLY, Budget
from faser.types.answer import SequenceError
from faser.types.sampling import StructuredOutput, StructureKind
from tests.checkpoints import VOCAB_SIZE
from tests.engine.structure.languages import EOS, the_compiler, the_tokenizer

PATIENCE_S = 60.0


def grammar(text: str) -> StructuredOutput:
    return StructuredOutput(kind=StructureKind.GRAMMAR, text=text)


# The draft rows after 122 "x" meet the limit of items in a row, in the branch that no committed token need take.
AMBIGUOUS = grammar('start: "a" ("b" | "c" big)\nbig: (x | y | z)*\nx: "x"+\ny: "x" "x"*\nz: "x" | "x" z\n')


def the_ids(text: str) -> list[int]:
    """A token for each byte."""
    tokenizer = the_tokenizer()
    return [token_id for each in text for token_id in tokenizer.encode(each)]


def row(matchers: SequenceMatchers, slot: int, position: int) -> list[int]:
    words, without_token = matchers.masks([(slot, ())], [position])
    assert not without_token
    return np.flatnonzero(np.unpackbits(words[0].view(np.uint8), bitorder="little")).tolist()


def begun(asked: StructuredOutput, output: Sequence[int], *, patience_s: float = PATIENCE_S) -> SequenceMatchers:
    matchers = SequenceMatchers(the_compiler(), num_threads=2, patience_s=patience_s)
    matchers.start(0, asked, output)
    return matchers


def test_draft_rows_that_meet_a_limit_end_no_answer() -> None:
    committed, (token_id,) = the_ids("ac" + 122 * "x"), the_ids("x")
    alone = begun(AMBIGUOUS, committed)
    expected = row(alone, 0, len(committed))
    assert token_id in expected

    matchers = begun(AMBIGUOUS, committed)
    for num_tokens in (300, 16):
        draft = (token_id,) * num_tokens
        matchers.num_allowed(0, draft)
        matchers.forced(0, draft, 8)
        matchers.masks([(0, draft)], [len(committed)])
        assert row(matchers, 0, len(committed)) == expected
    matchers.accept(0, token_id)
    assert row(matchers, 0, len(committed) + 1) == expected


def test_a_draft_that_meets_a_limit_is_refused_and_none_follows_for_a_while() -> None:
    committed, (token_id,) = the_ids("ac" + 122 * "x"), the_ids("x")
    matchers = begun(AMBIGUOUS, committed)
    assert matchers.may_draft(0, 4) == 4
    words, without_token = matchers.masks([(0, (token_id,) * 400)], [len(committed)])
    assert without_token == {0: None}
    assert not words.any()
    assert matchers.may_draft(0, 4) == 0
    assert matchers.num_allowed(0, (token_id,) * 4) == 0
    matchers.accept(0, *[token_id] * 64)
    assert matchers.may_draft(0, 4) == 4


def test_a_lexer_at_its_limit_ends_the_answer_that_took_it_there_alone() -> None:
    """All sequences with a grammar share its lexer, and later ones too."""
    asked = StructuredOutput(kind=StructureKind.REGEX, text="(a|b)*a(a|b){12}")
    limits = LLParserLimits(max_lexer_states=300, verbose_errors=False)
    compiler = GrammarCompiler(the_tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,), limits=limits)
    rng, letters = random.Random(1), the_ids("ab")
    matchers = SequenceMatchers(compiler, num_threads=2, patience_s=PATIENCE_S)
    matchers.start(0, asked, ())
    matchers.start(1, asked, letters[:1])
    expected = row(matchers, 1, 1)
    position = 0
    while row(matchers, 0, position):
        matchers.accept(0, rng.choice(letters))
        position += 1
        assert position < 500, "the limit was not met"
    assert row(matchers, 1, 1) == expected
    matchers.accept(1, letters[1])
    assert row(matchers, 1, 2)
    matchers.start(2, asked, ())
    assert row(matchers, 2, 0)
    later = compiler.matcher(asked)
    later.compute_bitmask()
    assert not later.is_error()


def test_a_slow_mask_makes_its_own_sequence_wait_and_no_other_one() -> None:
    asked, output = grammar('start: e\ne: "x" | e e | e e e'), the_ids("x" * 120)
    expected = row(begun(asked, output), 0, len(output))
    assert expected
    matchers = begun(grammar('start: "y"+'), (), patience_s=0.02)
    matchers.start(1, asked, output)
    began_s = time.perf_counter()
    words, without_token = matchers.masks([(0, ()), (1, ())], [0, len(output)])
    assert without_token.keys() >= {1}
    assert not words[1].any()
    while without_token:
        time.sleep(0.01)
        words, without_token = matchers.masks([(0, ()), (1, ())], [0, len(output)])
        assert None in without_token.values() or not without_token
        assert time.perf_counter() - began_s < PATIENCE_S
    assert np.flatnonzero(np.unpackbits(words[1].view(np.uint8), bitorder="little")).tolist() == expected
    assert words[0].any()
    assert matchers.may_draft(1, 1) == 0


def test_a_token_that_takes_too_long_ends_its_answer_with_the_reason() -> None:
    output = the_ids("x" * 150)
    matchers = SequenceMatchers(the_compiler(), num_threads=1, patience_s=0.01, longest_s=0.0)
    matchers.start(0, grammar('start: e\ne: "x" | e e | e e e'), output)
    words, without_token = matchers.masks([(0, ())], [len(output)])
    assert without_token == {0: SequenceError.GRAMMAR_TOO_SLOW}
    assert not words.any()


def test_steps_with_other_answers_wait_for_no_mask_that_is_expected_to_take_long() -> None:
    output = the_ids("x" * 150)
    matchers = begun(grammar('start: e\ne: "x" | e e | e e e'), output, patience_s=0.02)
    while matchers.masks([(0, ())], [len(output)])[1]:
        pass
    assert matchers.may_draft(0, 1) == 0
    matchers.accept(0, output[0])
    num_calls = 1
    while matchers.masks([(0, ())], [len(output) + 1], alone=False)[1]:
        num_calls += 1
    assert num_calls > 3


@pytest.mark.parametrize("patience_s", [0.02, PATIENCE_S])
def test_a_matcher_takes_tokens_alike_whether_it_is_slow_or_not(patience_s: float) -> None:
    """A slow one takes them without the interpreter lock."""
    token_ids, rows = the_ids("x" * 90), []
    asked = grammar('start: e\ne: "x" | e e | e e e')
    matchers = begun(asked, (), patience_s=patience_s)
    for position, token_id in enumerate(token_ids):
        while matchers.masks([(0, ())], [position])[1]:
            pass
        rows.append(row(matchers, 0, position))
        matchers.accept(0, token_id)
    assert all(token_id in each for token_id, each in zip(token_ids, rows, strict=True))
    again = begun(asked, token_ids[:-1])
    assert row(again, 0, len(token_ids) - 1) == rows[-1]


class _Withheld(GrammarCompiler):
    """Its matchers come once they are released, so that every mask takes as long as the test wants."""

    def __init__(self) -> None:
        super().__init__(the_tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
        self.prepare().join()
        self.released = threading.Event()

    def matcher(self, asked: StructuredOutput, budget: Budget = COSTLY) -> LLMatcher:
        self.released.wait(PATIENCE_S)
        return super().matcher(asked, budget)


def seconds_of(questions: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    questions()
    return time.perf_counter() - began_s


def test_all_questions_about_the_drafts_of_a_step_wait_once() -> None:
    """Ten sequences whose masks are not ready are asked three times each, as several drafters do."""
    patience_s, slots, draft = 0.5, range(10), tuple(the_ids("xx"))
    compiler = _Withheld()
    matchers = SequenceMatchers(compiler, num_threads=2, patience_s=patience_s)
    for slot in slots:
        matchers.start(slot, grammar(f'start: "x"+ "{slot}"'), ())

    def ask() -> None:
        for slot in slots:
            assert matchers.may_draft(slot, 2) == 0
            assert matchers.num_allowed(slot, draft) == 0
            assert matchers.forced(slot, (), 4) == []

    assert patience_s / 2 < seconds_of(ask) < 10 * patience_s
    assert seconds_of(lambda: matchers.may_draft(slots[-1], 1)) < patience_s
    matchers.masks([(slot, ()) for slot in slots], [0 for _ in slots], alone=False)
    assert seconds_of(lambda: matchers.may_draft(slots[-1], 1)) > patience_s / 2, "the next step waits again"
    compiler.released.set()
    for slot in slots:
        while matchers.masks([(slot, ())], [0])[1]:
            pass
        assert row(matchers, slot, 0) == the_ids("x")


def test_a_sequence_that_another_one_leaves_no_time_keeps_its_drafts() -> None:
    compiler = _Withheld()
    matchers = SequenceMatchers(compiler, num_threads=2, patience_s=1.0)
    compiler.released.set()
    matchers.start(0, AMBIGUOUS, the_ids("ac" + 60 * "x"))
    while matchers.masks([(0, ())], [62])[1]:
        pass
    compiler.released.clear()
    matchers.start(1, grammar('start: "x"+'), ())
    assert matchers.may_draft(1, 1) == 0
    matchers.num_allowed(0, tuple(the_ids(40 * "x")))
    assert matchers.may_draft(0, 1) == 1
    compiler.released.set()


def test_steps_wait_once_for_a_mask_that_takes_long() -> None:
    patience_s = 0.2
    compiler = _Withheld()
    matchers = SequenceMatchers(compiler, num_threads=2, patience_s=patience_s)
    matchers.start(0, grammar('start: "x"+'), ())

    def steps() -> None:
        for _ in range(20):
            assert matchers.may_draft(0, 1) == 0
            assert matchers.masks([(0, ())], [0], alone=False)[1] == {0: None}

    assert seconds_of(steps) < 20 * patience_s
    compiler.released.set()
    while matchers.masks([(0, ())], [0])[1]:
        pass
    assert row(matchers, 0, 0) == the_ids("x")
