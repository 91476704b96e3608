"""Prompts of a bench are read, sampled and selected; files without prompts are refused."""

from pathlib import Path

import pytest

from faser.bench.prompts import BenchPrompt, evenly_spaced, read_prompts, read_questions, select_prompts
from faser.bench.questions import QUESTIONS, Question
from faser.errors import ConfigError
from tests.fake_engine import byte_tokenizer

PROMPTS = [BenchPrompt(category="code", token_ids=(1, 2, 3)), BenchPrompt(category="chat", token_ids=(4, 5))]


def test_questions_are_rendered_with_the_chat_template() -> None:
    """Token ids of the byte tokenizer are the bytes of the rendered text."""
    prompts = read_prompts(None, byte_tokenizer(), limit=6)
    assert len(prompts) == 6
    first = bytes(prompts[0].token_ids).decode()
    assert first == f"[user]{QUESTIONS[0].text}[assistant]"
    assert len(read_prompts(None, byte_tokenizer())) == len(QUESTIONS)


def test_a_model_without_a_chat_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        read_prompts(None, byte_tokenizer(None))


def test_prompts_are_lines_or_first_turns(tmp_path: Path) -> None:
    text, records = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("one\n\ntwo\n")
    records.write_text('{"category": "code", "turns": ["first", "second"]}\n{"turns": ["third"]}\n')
    assert read_questions(text) == [Question(category="", text="one"), Question(category="", text="two")]
    assert read_questions(records) == [
        Question(category="code", text="first"),
        Question(category="", text="third"),
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


def test_a_sample_of_prompts_spreads_over_all() -> None:
    questions = [Question(category=each, text=str(number)) for each in "abc" for number in range(4)]
    assert [each.category for each in evenly_spaced(questions, 3)] == ["a", "b", "c"]
    assert evenly_spaced(questions, 100) == questions


def test_prompts_are_selected_by_category_and_length() -> None:
    assert select_prompts(PROMPTS, categories=["chat"], max_prompt_tokens=None) == [PROMPTS[1]]
    assert select_prompts(PROMPTS, categories=[], max_prompt_tokens=2) == [PROMPTS[1]]
    assert select_prompts(PROMPTS, categories=[], max_prompt_tokens=None) == PROMPTS


def test_a_selection_without_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match="'poems'; the prompts have chat, code"):
        select_prompts(PROMPTS, categories=["poems"], max_prompt_tokens=None)
    with pytest.raises(ConfigError, match="--max-prompt-tokens is 1; the shortest prompt has 2 tokens"):
        select_prompts(PROMPTS, categories=[], max_prompt_tokens=1)
