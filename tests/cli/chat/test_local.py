"""A model in this process answers."""

from pathlib import Path

import pytest

from faser.cli.main import main


def test_a_model_in_this_process_answers(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--in-process", "--backend", "torch", "--max-tokens", "4", "--temperature", "0", "--quick", "hello"]
    assert main(["chat", str(tiny_checkpoint), *flags]) == 0
    assert capsys.readouterr().out.endswith("\n")
