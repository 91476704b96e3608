"""The budget of lines: what counts, where it counts, and what fails."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.budget import excesses, lines_by_area, table

CODE = '"""A docstring\nof two lines."""\n\n# a comment\nx = (\n    1\n)  # three lines\n'
NATIVE = "// a comment\n\nint x;  // one line\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    files = {
        "faser/api/a.py": CODE,
        "faser/api/page/b.py": CODE * 2,
        "faser/native/c.cpp": NATIVE,
        "tests/d.py": CODE,
        "docs/e.py": CODE,
        "faser/api/page/f.js": "x\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for command in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def test_a_file_counts_for_the_innermost_area_with_its_lines_of_code(checkout: Path) -> None:
    """The second text of b.py begins with a string that is no docstring."""
    areas = {"faser": 10, "faser/api": 10, "faser/api/page": 3, "tests": 3}
    found = lines_by_area(checkout, areas)
    assert found == {"faser": 1, "faser/api": 3, "faser/api/page": 8, "tests": 3}
    (over,) = excesses(found, areas)
    assert over.startswith("faser/api/page has 8 lines of code; its budget is 3: remove some, or raise the budget")
    assert table(found, areas).splitlines()[-1].split() == ["faser/", "in", "all", "12", "23"]


def test_every_file_of_the_package_has_an_area(checkout: Path) -> None:
    with pytest.raises(ValueError, match=r"faser/native/c\.cpp is in no area of budget\.toml; add one"):
        lines_by_area(checkout, {"faser/api": 10})
