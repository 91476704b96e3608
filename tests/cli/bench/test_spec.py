"""`faser bench spec` refuses a wrong command line before it loads a model."""

import json
import shlex
from pathlib import Path

import pytest

from faser.cli.main import main


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--concurrency", "0"], "faser bench: --concurrency is 0; it must be numbers of at least 1, like 1,2,4"),
        (["--concurrency", "x"], "faser bench: --concurrency is x; it must be numbers of at least 1, like 1,2,4"),
        (["--concurrency", "4,x"], "faser bench: --concurrency is x; it must be numbers of at least 1"),
        (["--concurrency", ","], "faser bench: --concurrency is ','; it must be numbers of at least 1"),
        (["--rounds", "1.5"], "faser bench: --rounds is 1.5; it must be a whole number of at least 1"),
        (
            ["--temperature", "3"],
            "faser bench: --temperature is 3; it must be a number of at least 0 and at most 2",
        ),
        (["--temperature", "hot"], "faser bench: --temperature is hot; it must be a number of at least 0"),
        (["--drop-below", "nan"], "faser bench: --drop-below is nan; it must be a number of at least 0 and below"),
        (["--min-seconds", "inf"], "faser bench: --min-seconds is inf; it must be a number of at least 0"),
        (["--policies", "fixed:99"], "fixed:N needs an N of 1 …"),
        (["--policies", "table:4=5"], "names 'table:4=5'; an engine has one table"),
        (["--policies", "table"], "names 'table'; an engine has one table"),
        (["--policies", "fast"], "names 'fast'; it must be one of off, fixed, table,"),
        (["--dtype", "int8"], "faser bench: --dtype is int8; it must be one of auto, bfloat16"),
        (
            ["--prompts", "/no/such/file"],
            "--prompts is /no/such/file; it cannot be read: No such file or directory",
        ),
        (["--speculative-config", "[1]"], "it must be a JSON object"),
        (["--speculative-config", "{"], "not JSON"),
    ],
)
def test_a_wrong_command_line_is_refused_before_a_model_is_loaded(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench", "spec", "--out", str(tmp_path / "new"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    assert main(["bench", "spec", "/no/such/model", "--out", str(out)]) == 2
    assert capsys.readouterr().err == (
        f"faser bench: --out is {out}; it must be a folder that can be written: Not a directory\n"
    )


def test_the_command_in_the_report_can_be_run(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "two words.txt").write_text("the cat\n")
    flags = ["--prompts", str(tmp_path / "two words.txt"), "--policies", "off", "--concurrency", "1"]
    flags += ["--temperature", "0", "--rounds", "1", "--min-seconds", "0", "--output-tokens", "2"]
    given = ["bench", "spec", str(tiny_checkpoint), *flags, "--out", str(tmp_path / "out")]
    assert main(given) == 0
    capsys.readouterr()
    about = json.loads((tmp_path / "out" / "result.json").read_text())["about"]
    assert shlex.split(about["command"]) == ["faser", *given]


def test_a_folder_for_the_result_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "spec"]) == 2
    assert "--out is needed" in capsys.readouterr().err


def test_an_existing_result_is_neither_overwritten_nor_resumed_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "result.json").write_text("{}")
    assert main(["bench", "spec", "--out", str(tmp_path)]) == 2
    assert "it holds a result: give --resume" in capsys.readouterr().err
    assert (tmp_path / "result.json").read_text() == "{}"
