"""What a checkout is counted as. Oracle: a small one, counted by hand."""

import subprocess
from pathlib import Path

from benchmarks.house import counted, drawing, folders

TEXT = '''"""A module.

Of two paragraphs.
"""

from typing import Protocol


class Seam(Protocol):
    """A docstring."""

    def of(self, name: str | None) -> int: ...  # a comment


def size(name: str | None) -> int:
    return 0 if name is None else len(name)
'''


def test_a_checkout_is_counted_as_by_hand(tmp_path: Path) -> None:
    for name in ("__init__.py", "a.py", "b/__init__.py", "b/c.py"):
        path = tmp_path / "faser" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if name.endswith("__init__.py") else TEXT)
    (tmp_path / "faser" / "unknown.py").write_text("x = 1\n")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "faser/__init__.py", "faser/a.py", "faser/b"], cwd=tmp_path, check=True)
    assert counted(tmp_path) == {
        "lines": 2 * 16,
        "lines of code": 2 * 5,
        "modules": 2,
        "classes": 2,
        "Protocols": 2,
        "| None": 4,
        "is None": 2,
        "folders": 2,
        "public classes of two modules": 1,
        "functions": 4,
        "functions over 50 lines": 0,
        "functions of 9 or more parameters": 0,
        "lines of C++": 0,
        "lines of the page": 0,
    }
    assert folders(tmp_path) == {"b": 16}


def test_a_folder_has_a_bar_for_each_checkout() -> None:
    before, after = drawing({"1": {"api": 1000}, "2": {"api": 2, "ray": 1}, "3": {"api": 2000, "ray": 500}}).split(
        "\n"
    )
    assert before.split() == ["api", "1.0k", "██", "2.0k", "████"]
    assert after.split() == ["ray", "0.0k", "0.5k", "█"]
