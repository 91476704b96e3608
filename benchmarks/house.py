"""Counts how large the package is and how it is cut, in one checkout or several side by side.

    python -m benchmarks house OUT.json CHECKOUT [CHECKOUT ...]

Of `faser/` in each checkout, as git has it: lines, and those that are code; modules that are no `__init__`, and
folders; classes, Protocols, and public classes that two modules define; `| None`, and `is None` or `is not None`;
functions, long ones, and those with many parameters; lines of C++ and of the page. Under the table stand the lines
of each folder as bars, in thousands, which docs/architecture.md shows.
"""

import argparse
import ast
import io
import json
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

LONG, MANY = 50, 9  # lines of a function; its parameters
HALVES = ("engine", "kernels")  # folders whose own folders are counted apart
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def counted(checkout: Path) -> dict[str, int]:
    """The figures of one checkout, by name."""
    files = _files(checkout)
    found: Counter[str] = Counter()
    classes: Counter[str] = Counter()
    for file in files:
        text = (checkout / file).read_text(encoding="utf-8")
        tree = ast.parse(text)
        found["lines"] += len(text.splitlines())
        found["lines of code"] += len(lines_of_code(text, tree))
        found["modules"] += file.name != "__init__.py"
        classes.update(
            each.name for each in tree.body if isinstance(each, ast.ClassDef) and not each.name.startswith("_")
        )
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found["classes"] += 1
                found["Protocols"] += any("Protocol" in ast.unparse(base) for base in node.bases)
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
                found["| None"] += _is_none(node.left) or _is_none(node.right)
            elif isinstance(node, ast.Compare):
                pairs = zip(node.ops, node.comparators, strict=True)
                found["is None"] += sum(
                    isinstance(op, ast.Is | ast.IsNot) and _is_none(right) for op, right in pairs
                )
            elif isinstance(node, ast.Assert):
                found["assert … is not None"] += ast.unparse(node.test).endswith("is not None")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args
                found["functions"] += 1
                found[f"functions over {LONG} lines"] += (node.end_lineno or 0) - node.lineno >= LONG
                found[f"functions of {MANY} or more parameters"] += (
                    len(given.posonlyargs + given.args + given.kwonlyargs) >= MANY
                )
    found["folders"] = len({file.parent for file in files})
    found["public classes of two modules"] = sum(count > 1 for count in classes.values())
    native = [each for ending in ("cpp", "h") for each in _files(checkout, ending)]
    page = [each for ending in ("js", "css", "html") for each in _files(checkout, ending)]
    found["lines of C++"], found["lines of the page"] = _lines(checkout, native), _lines(checkout, page)
    return dict(found)


def _files(checkout: Path, ending: str = "py") -> list[Path]:
    """Files of the package that git has in this checkout."""
    listed = subprocess.run(
        ["git", "ls-files", f"faser/*.{ending}"], cwd=checkout, capture_output=True, text=True, check=True
    )
    return sorted({Path(line) for line in listed.stdout.split()})


def _lines(checkout: Path, files: Iterable[Path]) -> int:
    return sum(len((checkout / each).read_text(encoding="utf-8").splitlines()) for each in files)


def folders(checkout: Path) -> dict[str, int]:
    """Lines of Python in each folder of the package; modules beside the folders are left out."""
    found: Counter[str] = Counter()
    for file in _files(checkout):
        depth = 2 if file.parts[1] in HALVES else 1
        if len(file.parts) > depth + 1:
            found["/".join(file.parts[1 : depth + 1])] += _lines(checkout, [file])
    return dict(found)


def drawing(lines: dict[str, dict[str, int]]) -> str:
    """Bars of each folder in the first and the last checkout: a full block is 500 lines."""
    first, *_, last = lines.values()
    rows = []
    for name in sorted({*first, *last}):
        before, after = first.get(name, 0), last.get(name, 0)
        bars = [f"{count / 1000:5.1f}k {'█' * round(count / 500):37}" for count in (before, after)]
        rows.append(f"{name:20}{' '.join(bars)}".rstrip())
    return "\n".join(rows)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def lines_of_code(text: str, tree: ast.Module) -> set[int]:
    """Numbers of the lines that hold more than blanks, comments and docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            value = first.value if isinstance(first, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstrings


def table(counts: dict[str, dict[str, int]]) -> str:
    """One column for each checkout, as Markdown."""
    names = dict.fromkeys(name for each in counts.values() for name in each)
    rows = [["", *counts], ["---"] * (len(counts) + 1)]
    rows += [[f"`{name}`", *(f"{each.get(name, 0):,}" for each in counts.values())] for name in names]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("checkouts", type=Path, nargs="+", metavar="CHECKOUT")
    options = parser.parse_args()
    counts, lines = {}, {}
    for checkout in options.checkouts:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True
        )
        counts[commit.stdout.strip()] = counted(checkout)
        lines[commit.stdout.strip()] = folders(checkout)
    options.out.write_text(json.dumps(counts, indent=1) + "\n")
    print(table(counts))
    print(drawing(lines))
