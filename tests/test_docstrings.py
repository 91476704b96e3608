"""First lines of docstrings can be read without the signature, so they begin with a verb or a noun."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("faser", "benchmarks", "deploy", "examples")
FRAGMENTS = frozenset({"of", "what", "as", "where", "who", "how", "which", "whether", "why", "by"})
RULE = "begin with a verb in the imperative for a function, with a noun for a class or a module"

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def faults(path: Path, source: str) -> list[str]:
    found = []
    for node, is_method in _documented(ast.parse(source)):
        line = (ast.get_docstring(node) or "").partition("\n")[0]
        if line and (complaint := _complaint(line, is_method=is_method)):
            found.append(f"{path}:{node.body[0].lineno}: {line!r} {complaint}; {RULE}")
    return found


def _complaint(line: str, *, is_method: bool) -> str | None:
    """Return what is wrong with a first line; a method may refer to the protocol that it implements."""
    word = line.split()[0].strip(".,:;").lower()
    if word in FRAGMENTS:
        return f"begins with {word!r}, which leaves the subject to the signature"
    if line.startswith("["):
        return "begins with a shape, which says nothing of its meaning"
    if word == "see" and not is_method:
        return "refers to another text before it says a fact of its own"
    return None


def _documented(node: ast.AST, *, in_class: bool = False) -> Iterator[tuple[Documented, bool]]:
    """Yield every node that may have a docstring, and whether it is a method."""
    if isinstance(node, Documented):
        yield node, in_class and not isinstance(node, ast.ClassDef)
    for child in ast.iter_child_nodes(node):
        yield from _documented(child, in_class=isinstance(node, ast.ClassDef))


def test_first_lines_can_be_read_without_the_signature() -> None:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [fault for path in paths for fault in faults(path.relative_to(ROOT), path.read_text("utf-8"))]
    assert len(paths) > 500
    assert not found, "\n".join(found)


def test_a_fragment_is_found_wherever_it_stands() -> None:
    source = '''"""What this module has."""

class Shape:
    """Of a tensor: its sizes.

    Whether a later line is a fragment does not matter.
    """

    def size(self):
        """[N] numbers."""

        def inner():
            """Whether: it is inner."""

    async def run(self):
        """See Runner."""

    def plain(self):
        """Return the size."""

if True:
    def run():
        """See Runner."""
'''
    found = faults(Path("faser/a.py"), source)
    assert [each.split(": ")[0] for each in found] == [f"faser/a.py:{line}" for line in (1, 4, 10, 13, 23)]
    assert found[1] == (
        "faser/a.py:4: 'Of a tensor: its sizes.' begins with 'of', which leaves the subject to the signature; "
        "begin with a verb in the imperative for a function, with a noun for a class or a module"
    )
    assert "begins with a shape" in found[2]
    assert "refers to another text" in found[4]
