"""The table of programs has all of them, each with a line, and runs them by name."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import FOLDER, main, programs


def test_every_program_has_a_line_that_does_not_begin_with_its_command() -> None:
    known = programs()

    assert {"speed.default_flags", "simulator", "exactness.answers_hash", "budget"} <= known.keys()
    assert not [name for name, (_, line) in known.items() if not line or line.startswith(("python", "`python"))]


def test_a_module_that_no_command_runs_has_no_block_for_one() -> None:
    """A program left out of the table, or one that `python -m` would import and do nothing, is found."""
    own_command = {"__main__.py", "budget.py", "generators/vllm_launcher.py", "peers/sentence_server.py"}
    blocks = {
        path.relative_to(FOLDER).as_posix()
        for path in FOLDER.rglob("*.py")
        if "\nif __name__ ==" in path.read_text()
    }
    assert {each for each in blocks if not each.startswith("gpu/")} == own_command


def test_every_program_is_called_without_arguments() -> None:
    for module, _ in programs().values():
        tree = ast.parse(Path(str(FOLDER.parent / module.replace(".", "/")) + ".py").read_text())
        (function,) = (each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "main")
        assert len(function.args.args) == len(function.args.defaults), module


def test_a_program_gets_its_arguments_and_its_status_is_returned(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "budget"]
    (tmp_path / "budget.toml").write_text('"faser" = 0\n')
    (tmp_path / "faser").mkdir()
    (tmp_path / "faser" / "a.py").write_text("x = 1\n")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "--all"], cwd=tmp_path, check=True)

    done = subprocess.run(
        [*command, str(tmp_path)], cwd=FOLDER.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "faser has 1 lines of code" in done.stderr
    helped = subprocess.run([*command, "--help"], cwd=FOLDER.parent, capture_output=True, text=True, check=True)
    assert helped.stdout.startswith("usage: python -m benchmarks budget")


def test_a_program_that_is_run_as_a_module_says_how_it_is_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.speed.default_flags"], cwd=FOLDER.parent, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith("python -m benchmarks speed.default_flags")


def test_a_name_that_is_none_is_refused_with_near_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["speed.default_flag"]) == 2
    assert "perhaps speed.default_flags" in capsys.readouterr().err
