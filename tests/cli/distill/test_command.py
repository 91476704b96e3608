"""`faser distill` with a tiny model, as a user runs it."""

from pathlib import Path

import pytest

from faser.cli.main import main
from faser.distill.conversations.dataset import Dataset

FLAGS = ("--backend", "torch", "--num-threads", "1", "--max-num-seqs", "4")


@pytest.mark.slow
def test_questions_of_a_file_are_answered_and_kept(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the fox\nthe dog\nthe wizards\n")
    command = ["distill", str(tiny_checkpoint), "-o", str(tmp_path / "out"), "--prompts", str(prompts)]

    assert main([*command, *FLAGS, "--tokens", "100"]) == 0

    assert "00000.npz: 6 of 6 questions kept" in capsys.readouterr().err
    dataset = Dataset(tmp_path / "out" / "conversations")
    assert dataset.answer_tokens >= 100
    assert main([*command, *FLAGS, "--tokens", "100"]) == 0
    assert "questions kept" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_that_never_ends_a_question_is_refused(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights are random."""
    assert main(["distill", str(tiny_checkpoint), "-o", str(tmp_path / "out"), *FLAGS, "--tokens", "10"]) == 2
    assert "it was not trained on what users say: give questions with --prompts" in capsys.readouterr().err
