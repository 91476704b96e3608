"""Prompts from a file in Spec-Bench's format."""

import json
from pathlib import Path

import pytest

from benchmarks.prompts import load_prompts, take


def _write(path: Path, count: int) -> Path:
    questions = [
        {"question_id": index, "category": "qa" if index < count / 2 else "rag", "turns": [f"q{index}", "later"]}
        for index in range(count)
    ]
    path.write_text("".join(json.dumps(question) + "\n" for question in questions))
    return path


def test_first_turns_come_in_the_same_mixed_order_every_time(tmp_path: Path) -> None:
    path = _write(tmp_path / "question.jsonl", 60)

    prompts = load_prompts(path)

    assert prompts == load_prompts(path)
    assert {prompt.text for prompt in prompts} == {f"q{index}" for index in range(60)}
    assert {prompt.category for prompt in take(prompts, 0, 12)} == {"qa", "rag"}


def test_taking_more_prompts_than_there_are_begins_anew(tmp_path: Path) -> None:
    prompts = load_prompts(_write(tmp_path / "question.jsonl", 5))

    assert take(prompts, 3, 4) == (prompts[3], prompts[4], prompts[0], prompts[1])


@pytest.mark.parametrize("line", ['{"question_id": 1, "category": "qa"}', '{"turns": []}', "no json"])
def test_a_line_that_is_no_question_is_named(tmp_path: Path, line: str) -> None:
    path = _write(tmp_path / "question.jsonl", 2)
    path.write_text(path.read_text() + line + "\n")

    with pytest.raises(ValueError, match=r"question\.jsonl:3"):
        load_prompts(path)


def test_only_questions_of_the_categories_are_kept_in_the_order_of_all(tmp_path: Path) -> None:
    path = _write(tmp_path / "question.jsonl", 20)

    kept = load_prompts(path, ["rag"])

    assert kept == tuple(prompt for prompt in load_prompts(path) if prompt.category == "rag")
    assert len(kept) == 10
    with pytest.raises(ValueError, match="no questions of poems"):
        load_prompts(path, ["poems"])
