"""Prompts of a bench are read and rendered; files without prompts are refused."""

from pathlib import Path

import pytest

from faser.cli.bench.prompts import QUESTIONS, Question, read_prompts, read_questions
from faser.errors import ConfigError
from tests.fake_engine import byte_tokenizer


def test_questions_are_rendered_with_the_chat_template() -> None:
    """Token ids of the byte tokenizer are the bytes of the rendered text."""
    prompts = read_prompts(None, byte_tokenizer())
    assert len(prompts) == len(QUESTIONS)
    first = bytes(prompts[0].token_ids).decode()
    assert first == f"[user]{QUESTIONS[0].text}[assistant]"


def test_a_model_without_a_chat_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        read_prompts(None, byte_tokenizer(None))


def test_prompts_are_lines_or_first_turns(tmp_path: Path) -> None:
    text, records = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("one\n\ntwo\n")
    records.write_text('{"category": "code", "turns": ["first", "second"]}\n{"turns": ["third"]}\n')
    assert read_questions(text) == [Question("", "one"), Question("", "two")]
    assert read_questions(records) == [
        Question("code", "first"),
        Question("", "third"),
    ]


@pytest.mark.parametrize("name, text", [("a.jsonl", "{}"), ("a.jsonl", "no JSON"), ("a.txt", "\n")])
def test_prompts_that_cannot_be_read_are_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"--prompts is .*{name}"):
        read_questions(tmp_path / name)


def test_the_line_of_another_form_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"turns": ["first"]}\n\n{"turns": []}\n')
    with pytest.raises(ConfigError) as caught:
        read_questions(path)
    assert str(caught.value) == (
        f'--prompts is {path}; its line 3 must be JSON such as {{"category": "chat", "turns": ["Hello"]}}'
    )
