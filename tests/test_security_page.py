"""docs/security.md promises nothing without a test: every test that it names is there, and every row names one."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/security.md").read_text(encoding="utf-8")


def test_every_row_of_the_threat_model_names_a_test() -> None:
    tables = re.findall(r"^\| threat .*\n\| ---.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) > 30
    assert [row for row in rows if not re.search(r"`tests/\S+::test_\w+`", row)] == []


def test_every_named_test_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE)
    assert len(named) > 10
    missing = [f"{file}::{name}" for file, name in named if name not in functions(ROOT / file)]
    assert missing == []


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
