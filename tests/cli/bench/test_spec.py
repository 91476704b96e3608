"""`faser bench spec` refuses a wrong command line before it loads a model."""

from pathlib import Path

import pytest

from faser.cli.main import main


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--concurrency", "0"], "it must be numbers of at least 1"),
        (["--temperature", "3"], "it must be at least 0 and at most 2"),
        (["--policies", "fixed:99"], "fixed:N needs an N of 1 …"),
        (["--policies", "table:4=5"], "names 'table:4=5'; an engine has one table"),
        (["--policies", "table"], "names 'table'; an engine has one table"),
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
