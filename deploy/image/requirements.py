"""Prints what FASER and the given extras of it require, so that an image installs it before FASER's own code.

`python3 requirements.py [EXTRA…]`, beside pyproject.toml. Needs Python's own library alone.
"""

import sys
import tomllib
from pathlib import Path


def requirements(project: Path, extras: list[str]) -> list[str]:
    """Raises SystemExit for an extra that there is not."""
    declared = tomllib.loads(project.read_text())["project"]
    optional = declared["optional-dependencies"]
    for extra in extras:
        if extra not in optional:
            raise SystemExit(f"pyproject.toml has no extra {extra}; it has {', '.join(optional)}")
    return [*declared["dependencies"], *(each for extra in extras for each in optional[extra])]


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements(Path("pyproject.toml"), sys.argv[1:])) + "\n")
