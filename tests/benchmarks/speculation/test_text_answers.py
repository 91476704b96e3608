"""Recorded answers in their file, and given anew in counted time.

Planted bugs that these tests have caught: a step samples a token beyond the first wrong draft; rows of a prompt
count; drafts of which none is right count as accepted.
"""

from pathlib import Path

import pytest

from benchmarks.speculation.text_answers import LOOK_UP, Answer, CountedEngine, read, write
from tests.checkpoints import write_tiny_checkpoint

SECONDS = {1: 1.0, 2: 1.1, 32: 4.0}
COPYING = Answer(temperature=0.0, prompt=(5, 6, 7, 8, 9, 5, 6), tokens=(7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7, 8))
CHANGING = Answer(temperature=0.0, prompt=(5, 6, 7, 8, 9, 5, 6), tokens=(7, *range(20, 31)))


def test_answers_are_read_as_they_were_written(tmp_path: Path) -> None:
    answers = [
        Answer(temperature=0.8, prompt=(9, 8), tokens=(1, 2)),
        Answer(temperature=0.0, prompt=(7,), tokens=()),
    ]
    write(tmp_path / "answers.jsonl", answers[:1])
    write(tmp_path / "answers.jsonl", answers[1:])

    assert read(tmp_path / "answers.jsonl") == answers


def test_recorded_answers_are_given_whatever_is_drafted(tmp_path: Path) -> None:
    model = str(write_tiny_checkpoint(tmp_path / "model"))
    plain = CountedEngine(model, None, SECONDS, requests=1)
    drafting = CountedEngine(model, {"ngram_model": "none"}, SECONDS, requests=1)
    for answer, copies in ((COPYING, True), (CHANGING, False)):
        without, found = plain.answer([answer], most=64), drafting.answer([answer], most=64)
        assert without["tokens"] == found["tokens"] == 12
        assert (without["accepted"], without["rows_per_step"]) == (0, 1.0)
        assert without["tokens_per_s"] == pytest.approx(12 / 11, rel=0.01)  # the prompt's step brings a token too
        assert found["rows_per_step"] > 1
        assert found["accepted"] == 0 or copies
        if copies:
            assert found["accepted"] >= 6
            assert found["tokens_per_s"] > without["tokens_per_s"]
    assert LOOK_UP.seconds_at(1) < 1e-4
