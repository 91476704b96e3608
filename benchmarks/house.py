"""Counts how large the package is and how it is cut, in one checkout or several side by side.

    python -m benchmarks house OUT.json CHECKOUT [CHECKOUT ...]

Of `faser/` in each checkout, as git has it: lines, and those that are code; modules that are no `__init__`, and
folders; classes, Protocols, and public classes that two modules define; `| None`, and `is None` or `is not None`.
"""

import argparse
import ast
import io
import json
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def counted(checkout: Path) -> dict[str, int]:
    """The figures of one checkout, by name."""
    listed = subprocess.run(
        ["git", "ls-files", "faser/**.py", "faser/*.py"], cwd=checkout, capture_output=True, text=True, check=True
    )
    files = sorted({Path(line) for line in listed.stdout.split()})
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
    found["folders"] = len({file.parent for file in files})
    found["public classes of two modules"] = sum(count > 1 for count in classes.values())
    return dict(found)


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
    counts = {}
    for checkout in options.checkouts:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True
        )
        counts[commit.stdout.strip()] = counted(checkout)
    options.out.write_text(json.dumps(counts, indent=1) + "\n")
    print(table(counts))
