"""Conversations: which messages are kept, and what is printed."""

import io
from collections.abc import Generator, Sequence
from typing import Self

import pytest

from faser.cli.chat.answerer import Message
from faser.cli.chat.conversation import Conversation, talk
from faser.errors import EngineError


class EchoAnswerer:
    """Repeats each question, numbered, and records it. "fail" and "interrupt" end the answer early."""

    def __init__(self) -> None:
        self.asked: list[list[Message]] = []
        self.closed = 0

    def answer(self, messages: Sequence[Message]) -> Generator[str, None, None]:
        self.asked.append(list(messages))
        question = messages[-1]["content"]
        try:
            yield f"{len(self.asked)}: "
            if question == "interrupt":
                raise KeyboardInterrupt
            if question == "fail":
                raise EngineError("it broke")
            yield question
        finally:
            self.closed += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def run_script(text: str, system_prompt: str | None = None) -> tuple[EchoAnswerer, str, int]:
    answerer, out = EchoAnswerer(), io.StringIO()
    status = talk(Conversation(answerer, system_prompt=system_prompt), io.StringIO(text), out)
    return answerer, out.getvalue(), status


def test_every_line_of_a_script_gets_an_answer_that_ends_with_a_newline() -> None:
    answerer, out, status = run_script("hello\n\nagain\n")
    assert out == "1: hello\n2: again\n"
    assert status == 0
    assert answerer.closed == 2


def test_a_conversation_remembers_both_sides() -> None:
    answerer, _, _ = run_script("hello\nagain\n", system_prompt="be brief")
    assert [(each["role"], each["content"]) for each in answerer.asked[1]] == [
        ("system", "be brief"),
        ("user", "hello"),
        ("assistant", "1: hello"),
        ("user", "again"),
    ]


def test_reset_forgets_all_but_the_system_prompt() -> None:
    answerer, _, _ = run_script("hello\n/reset\nagain\n", system_prompt="be brief")
    assert [each["content"] for each in answerer.asked[1]] == ["be brief", "again"]


def test_exit_ends_a_script() -> None:
    answerer, _, _ = run_script("hello\n/exit\nagain\n")
    assert len(answerer.asked) == 1


def test_a_stopped_answer_is_kept_up_to_where_it_stopped() -> None:
    answerer, out, _ = run_script("interrupt\nagain\n")
    assert out == "1:  [stopped]\n2: again\n"
    assert answerer.asked[1][1]["content"] == "1: "


def test_a_failed_question_is_forgotten_and_makes_a_script_fail(capsys: pytest.CaptureFixture[str]) -> None:
    answerer, _, status = run_script("fail\nagain\n")
    assert status == 1
    assert [each["content"] for each in answerer.asked[1]] == ["again"]
    assert capsys.readouterr().err == "faser chat: it broke\n"
