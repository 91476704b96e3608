"""Prompts come from text and JSON lines; a sample spreads over all of them."""

from pathlib import Path

import pytest

from faser.bench.prompts import questions_of, spread
from faser.errors import ConfigError


def test_prompts_are_lines_or_first_turns(tmp_path: Path) -> None:
    text, records = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("one\n\ntwo\n")
    records.write_text('{"category": "code", "turns": ["first", "second"]}\n{"turns": ["third"]}\n')
    assert questions_of(text) == [("", "one"), ("", "two")]
    assert questions_of(records) == [("code", "first"), ("", "third")]


@pytest.mark.parametrize("name, text", [("a.jsonl", "{}"), ("a.jsonl", "no JSON"), ("a.txt", "\n")])
def test_prompts_that_cannot_be_read_are_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"--prompts is .*{name}"):
        questions_of(tmp_path / name)


def test_a_sample_of_prompts_spreads_over_all() -> None:
    questions = [(kind, str(number)) for kind in "abc" for number in range(4)]
    assert [kind for kind, _ in spread(questions, 3)] == ["a", "b", "c"]
    assert spread(questions, 100) == questions
