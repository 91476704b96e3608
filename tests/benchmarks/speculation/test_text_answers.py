"""Recorded answers in their file."""

from pathlib import Path

from benchmarks.speculation.text_answers import Answer, read, write


def test_answers_are_read_as_they_were_written(tmp_path: Path) -> None:
    answers = [
        Answer(temperature=0.8, prompt=(9, 8), tokens=(1, 2)),
        Answer(temperature=0.0, prompt=(7,), tokens=()),
    ]
    write(tmp_path / "answers.jsonl", answers[:1])
    write(tmp_path / "answers.jsonl", answers[1:])

    assert read(tmp_path / "answers.jsonl") == answers
