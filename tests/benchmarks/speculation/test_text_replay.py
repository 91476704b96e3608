"""Drafters replayed over recorded answers. Oracle: answers and drafts that are counted by hand."""

from pathlib import Path

import pytest
from benchmarks.speculation.text_answers.drafters import CHAIN, Draft, Recycled, Successors
from benchmarks.speculation.text_answers.scoring import Offers, Rates, Tally, gain, offers, played

from benchmarks.speculation.text_answers import AGENT, Answer, conversations, grown, read, write

ANSWER = Answer(
    kind="questions",
    conversation="questions 0",
    temperature=0.0,
    prompt=(9, 8),
    tokens=(1, 2, 3, 1, 2, 3, 1, 2),
    top=((1, 5), (2, 5), (3, 5), (1, 5), (2, 5), (3, 5), (1, 5), (2, 5)),
    top_logprobs=((-0.1, -3.0),) * 8,
)


class Scripted:
    """Proposes the same draft at every position."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    def begin(self, answer: Answer) -> None:
        pass

    def drafts(self) -> list[Draft]:
        return [self._draft]

    def learn(self, token: int, top: object, top_logprobs: object, /) -> None:
        pass

    def end(self) -> None:
        pass


def sure(found: Offers) -> Rates:
    """Rates that have seen these offers often."""
    rates = Rates()
    for _ in range(200):
        rates.learn(found)
    return rates


def test_a_draft_is_right_as_far_as_it_equals_the_answer() -> None:
    found = offers(Scripted([(1, "a"), (2, "b"), (7, "c")]), "scripted", ANSWER)
    assert [offer.right for (offer,) in found] == [0, 0, 2, 0, 0, 2, 0]


def test_a_step_goes_on_by_the_right_tokens_and_one() -> None:
    """Of seven tokens after the first, 2 3 come alone, then 1 2 with 3, then 1 2."""
    found = offers(Scripted([(1, "a"), (2, "b")]), "scripted", ANSWER)
    rates = sure(found)
    everything = played([found], rates, 0.0)
    assert (everything.steps, everything.tokens, everything.rows, everything.drafting) == (4, 7, 8, 4)
    assert played([found], rates, 1.0).rows == 0


def test_no_more_is_kept_than_is_worth_the_price_of_a_row() -> None:
    """The first token is right in two of seven places, the second whenever the first is."""
    found = offers(Scripted([(1, "a"), (2, "b"), (9, "c")]), "scripted", ANSWER)
    kept = played([found], sure(found), 0.1)
    assert kept.rows == 2 * kept.steps


def test_a_gain_is_tokens_over_the_time_of_their_rows() -> None:
    seconds = {1: 1.0, 2: 1.1, 4: 1.5, 8: 3.0}
    tally = Tally(steps=10, tokens=20, rows=10, drafting=10)
    assert gain(tally, 1, seconds) == pytest.approx(2 / 1.1)
    assert gain(tally, 4, seconds) == pytest.approx(2 * 1.5 / 3.0)
    assert gain(tally, 8, seconds) == pytest.approx(2 * 3.0 / 6.0)  # the last slope goes on


def test_recycling_follows_what_the_model_last_thought_likeliest() -> None:
    for drafter in (Successors((1,), by_argmax=True), Recycled()):
        found = offers(drafter, "recycling", ANSWER)
        assert [[offer.right for offer in offered] for offered in found] == [[], [], [], [4], [3], [2], [1]]
        assert all(len(offer.confidences) <= CHAIN for offered in found for offer in offered)


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path / "answers.jsonl", [ANSWER])
    write(tmp_path / "answers.jsonl", [ANSWER.cut(3)])
    assert read(tmp_path / "answers.jsonl") == [ANSWER, ANSWER.cut(3)]
    assert len(ANSWER.cut(3).top) == 3


def test_an_agent_hears_of_one_order_after_the_other() -> None:
    (talk,) = conversations(AGENT, Path("unused"), count=1)
    again = conversations(AGENT, Path("unused"), count=1)[0]
    messages = grown(talk, ["one", "two"])
    assert messages == grown(again, ["one", "two"])
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 2, "user"]
    assert len({message["content"] for message in messages if message["role"] == "user"}) == 3
