"""Answers of every format in any pieces, and cut at every character. The answers and their oracles are composed.

That the pieces make no difference is shown for all divisions of an answer at once. Let S(k) be the state of a
parser that got the first k characters one by one. If a parser in state S(i) that gets characters i to k as one
piece is in state S(k), for all i < k, then so is every parser that got k characters in any pieces, by induction.
The states are complete, see states.py, so what the parsers make of later text is the same too.

Bugs that these tests have been seen to catch: the separator of texts around calls lost; an end tag that ends a
value; markup at a cut as content; a call lost at a cut; half a mark passed on.
"""

import json
from collections.abc import Sequence
from functools import cache
from itertools import islice
from typing import Any

import pytest

from faser.api.parsing.answer_parser import AnswerParser, AnswerParsing
from faser.api.parsing.events import AnswerEvent, Message, collect
from faser.api.parsing.registry import TOOL_PARSERS
from tests.api.parsing.generators import CORPUS, FORMATS, TOOLS, Answer, answers_of, lines_of
from tests.api.parsing.states import shown, state_of
from tests.fake_engine import byte_tokenizer

_TOKENIZER = byte_tokenizer()
_PROVED_CHARS = 60
ALL = [each for name in FORMATS for each in answers_of(name)]
SHORT = [each for each in ALL if len(each.text) <= _PROVED_CHARS]


@cache
def parsing(name: str) -> AnswerParsing:
    return AnswerParsing(
        tokenizer=_TOKENIZER,
        reasoning=True,
        harmony=FORMATS[name].harmony,
        marks=FORMATS[name].think,
        tool_parser=TOOL_PARSERS[name],
        declared=TOOLS,
    )


def started(answer: Answer) -> AnswerParser:
    begin = FORMATS[answer.format].think_begin if answer.open else ""
    return parsing(answer.format).start(f"[assistant]{begin}")


def pushed(parser: AnswerParser, pieces: Sequence[str]) -> list[AnswerEvent]:
    return [event for each in pieces for event in parser.push(each, tuple(each.encode()), complete=False)]


def ended(answer: Answer, pieces: Sequence[str], *, cut: bool) -> Message:
    """The message, when the last piece ends the answer."""
    parser = started(answer)
    events = pushed(parser, pieces[:-1])
    return collect(events + parser.push(pieces[-1], tuple(pieces[-1].encode()), complete=True, cut=cut))


def plain(message: Message) -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, content, calls), without the random ids."""
    return message.reasoning, message.content, [(each.name, each.arguments) for each in message.tool_calls]


def test_every_format_has_a_generator_and_its_file() -> None:
    """A new parser needs an entry in FORMATS; python -m tests.api.parsing.generators writes the file."""
    assert set(FORMATS) == set(TOOL_PARSERS)
    assert {each.name: each.read_text() for each in CORPUS.glob("*.jsonl")} == {
        f"{name}.jsonl": lines_of(name) for name in FORMATS
    }


@pytest.mark.parametrize("name", FORMATS)
def test_answers_are_what_the_model_wrote_in_pieces_of_any_one_size(name: str) -> None:
    for answer in answers_of(name):
        for size in (1, 2, 3, 5, 7, 11, 1000):
            pieces = [answer.text[at : at + size] for at in range(0, len(answer.text), size)] or [""]
            for last in (pieces, [*pieces, ""]):
                reasoning, content, calls = plain(ended(answer, last, cut=False))
                found = (reasoning, content, [(called, json.loads(arguments)) for called, arguments in calls])
                assert found == (answer.reasoning, answer.content, answer.calls), (answer.text, size)


@pytest.mark.parametrize("name", FORMATS)
def test_a_cut_at_any_character_shows_beginnings_only(name: str, full: bool) -> None:
    """Once a call has begun, nothing is content that is not content of the whole answer.

    Text that is no call may look like one up to the cut. Every sixth answer, with --full all of them.
    """
    for answer in islice(answers_of(name), 0, None, 1 if full else 6):
        whole = plain(ended(answer, [answer.text], cut=False))
        for at in range(len(answer.text)):
            text = answer.text[:at]
            reasoning, content, calls = plain(ended(answer, [text], cut=True))
            assert plain(ended(answer, [*text, ""], cut=True)) == (reasoning, content, calls), text
            assert answer.open or whole[0].startswith(reasoning.rstrip("\n")), text
            if not answer.calls:
                continue
            assert calls[:-1] == whole[2][: max(len(calls) - 1, 0)], text
            if calls:
                called, arguments = calls[-1]
                assert called == whole[2][len(calls) - 1][0], text
                assert whole[2][len(calls) - 1][1].startswith(arguments), text
            assert whole[1].startswith(content) or (not calls and content in text), text


def prove(answer: Answer) -> None:
    """Show that in whatever pieces the answer, or its beginning, arrives, events and states are the same."""
    text = answer.text
    parser, events = started(answer), list[AnswerEvent]()
    states: list[Any] = [state_of(parser)]
    seen = [shown(events)]
    for char in text:
        events += pushed(parser, char)
        states.append(state_of(parser))
        seen.append(shown(events))
    ends = [[plain(ended(answer, [text[:k]], cut=cut)) for k in range(len(text) + 1)] for cut in (False, True)]
    for i in range(len(text)):
        for k in range(i + 1, len(text) + 1):
            before, piece = text[:i], text[i:k]
            parser = started(answer)
            events = pushed(parser, [before, piece])
            assert (shown(events), state_of(parser)) == (seen[k], states[k]), (before, piece)
            for cut in (False, True):
                assert plain(ended(answer, [before, piece], cut=cut)) == ends[cut][k], (before, piece)


@pytest.mark.parametrize("name", FORMATS)
def test_pieces_make_no_difference_to_short_answers(name: str, full: bool) -> None:
    """The shortest answers with a call, with reasoning, and with text on both sides; two, or all with --full."""
    mine = sorted((each for each in SHORT if each.format == name), key=lambda each: len(each.text))
    chosen = [
        next((each for each in mine if each.calls and each.calls[0][1]), None),
        next((each for each in mine if each.calls and each.content), None),
        next((each for each in mine if each.reasoning), None),
        next((each for each in mine if each.open), None),
    ]
    assert any(chosen)
    several = {id(each): each for each in chosen if each}.values()
    for answer in list(several)[: None if full else 2]:
        prove(answer)


@pytest.mark.full
@pytest.mark.parametrize("at", range(len(SHORT)))
def test_pieces_make_no_difference_to_any_answer_of_up_to_60_characters(at: int) -> None:
    prove(SHORT[at])
