"""Run a measurement by its name, or list them all.

    python -m benchmarks NAME [arguments]

NAME is that of a module with a function `main`, such as speed.default_flags. Those of GPUs have a command of their
own, `python -m benchmarks.gpu`.
"""

import ast
import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).parent


def programs() -> dict[str, tuple[str, str]]:
    """Return module and first line of the docstring of each program, by name; nothing is imported."""
    found = {}
    for path in sorted(FOLDER.rglob("*.py")):
        parts = path.relative_to(FOLDER).with_suffix("").parts
        if parts[0] in ("__main__", "gpu"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(each, ast.FunctionDef) and each.name == "main" for each in tree.body):
            name = ".".join(parts).removesuffix(".__main__")
            found[name] = (".".join(("benchmarks", *parts)), (ast.get_docstring(tree) or "").partition("\n")[0])
    return found


def main(arguments: Sequence[str]) -> int:
    """Run the named program with the arguments after its name; returns the exit status."""
    known = programs()
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, known))
        print(__doc__, *(f"{name:{width}}  {line}" for name, (_, line) in known.items()), sep="\n")
        return 0
    name, *rest = arguments
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"; perhaps {' or '.join(near)}" if near else ""
        print(f"there is no program {name}{hint}; python -m benchmarks --help lists all", file=sys.stderr)
        return 2
    sys.argv = [f"python -m benchmarks {name}", *rest]
    return int(import_module(known[name][0]).main() or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
