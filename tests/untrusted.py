"""Working directories that a program must not import from."""

import sys
from importlib.metadata import packages_distributions
from pathlib import Path

_MARK = (
    "import os\nopen({!r}, 'a').write(__name__ + '\\n')\nraise SystemExit('imported from the working directory')\n"
)


def hostile_folder(folder: Path) -> Path:
    """Make a folder with a module for every name that an import could ask for; imported_from says which ran."""
    folder.mkdir()
    names = {*sys.stdlib_module_names, *packages_distributions(), "faser", "sitecustomize", "usercustomize"}
    text = _MARK.format(str(_list_of(folder)))
    for name in names:
        (folder / f"{name}.py").write_text(text)
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(text)
    return folder


def imported_from(folder: Path) -> list[str]:
    """The modules of a hostile folder that were run."""
    ran = _list_of(folder)
    return ran.read_text().split() if ran.exists() else []


def parent_of_a_clone(folder: Path) -> Path:
    """Make a folder with a clone in it: imported from there, `faser` would be a package without contents."""
    (folder / "faser" / "docs").mkdir(parents=True)
    return folder


def _list_of(folder: Path) -> Path:
    return folder.with_suffix(".imported")
