"""Python children import this FASER and installed packages, whatever lies in the working directory."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import faser
from faser.processes import python_command
from tests.untrusted import hostile_folder, imported_from, parent_of_a_clone

PACKAGE = Path(faser.__file__).parent


def output_of(command: Sequence[str], folder: Path) -> str:
    """What a program that succeeds prints. It is started in a folder, by a Python without safe paths."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("make", [hostile_folder, parent_of_a_clone])
@pytest.mark.parametrize("module, said", [("faser", f"faser {faser.__version__}"), ("pip", "pip ")])
@pytest.mark.full(but=("faser-faser 0.1.0-hostile_folder", "pip-pip -parent_of_a_clone"))
def test_nothing_is_imported_from_the_working_directory(
    make: Callable[[Path], Path], module: str, said: str, tmp_path: Path
) -> None:
    folder = make(tmp_path / "work")
    assert output_of(python_command(module, "--version"), folder).startswith(said)
    assert imported_from(folder) == []


def test_a_child_is_of_the_same_package_as_its_parent_though_another_is_installed(tmp_path: Path) -> None:
    own = tmp_path / "faser"
    own.mkdir()
    for name in ("__init__.py", "child.py", "processes.py"):
        (own / name).write_text((PACKAGE / name).read_text())
    (own / "where.py").write_text(
        "import faser, os, sys\n"
        "folders = {'', os.getcwd(), os.path.dirname(__file__)}\n"  # the last one has a types.py
        "print(faser.__file__, __name__, sys.argv, folders.intersection(sys.path))\n"
    )
    parent = (
        "import subprocess, sys; from faser.processes import python_command; "
        "subprocess.run(python_command('faser.where', 'one', '--two'), check=True)"
    )
    (tmp_path / "elsewhere").mkdir()
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {parent}"]
    wanted = f"{own / '__init__.py'} __main__ {[str(own / 'where.py'), 'one', '--two']} set()\n"
    assert output_of(command, tmp_path / "elsewhere") == wanted


def test_a_child_starts_where_the_working_directory_is_gone(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    program = f'rmdir "{gone}"; exec "$@"'
    assert output_of(["sh", "-c", program, "sh", *python_command("faser", "--version")], gone).startswith("faser ")
