"""The command line of `faser distill`: what is read, and what is refused before a model is loaded."""

from pathlib import Path

import pytest

from faser.cli.distill.arguments import read_arguments
from faser.cli.main import main


def test_its_own_flags_and_those_of_the_engine_are_read() -> None:
    found = read_arguments(["tiny", "-o", "out", "--tokens", "1.5m", "--seed", "7", "--max-num-seqs", "8"])
    assert found is not None
    own, config = found
    assert (own.output, own.answer_tokens, own.seed) == (Path("out"), 1_500_000, 7)
    assert (config.model, config.max_num_seqs) == ("tiny", 8)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "faser distill: -o is missing; it names the folder where everything goes"),
        (
            ["-o", "out", "--prompts", "a", "--from-traffic", "b"],
            "--prompts and --from-traffic exclude each other: both are given",
        ),
        (["-o", "out", "--tokens", "0"], "--tokens is 0; it must be a whole number of at least 1"),
        (["-o", "out", "--tokens", "many"], "--tokens is many; it must be a whole number of at least 1"),
        (["-o", "out", "--tokens", "1.5"], "--tokens is 1.5; it must be a whole number of at least 1"),
        (["-o", "out", "--hours", "0"], "--hours is 0; it must be a number of hours above 0"),
        (["-o", "out", "--epochs", "x"], "--epochs is x; it must be a whole number of at least 1"),
        (
            ["-o", "out", "--draft-steps", "17"],
            "--draft-steps is 17; it must be a whole number of at least 1 and at",
        ),
        (["-o", "out", "--head-dtype", "int4"], "--head-dtype: invalid choice: 'int4'"),
        (["-o", "out", "--port", "8000"], "faser distill: --port: unknown flag."),
        (["-o", "out", "--max-num-seqs", "0"], "faser distill: --max-num-seqs is 0; it must be"),
    ],
)
def test_a_wrong_command_line_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["distill", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["distill", "--help"]) == 0
    assert "usage: faser distill" in capsys.readouterr().out
