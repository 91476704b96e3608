"""What is never loaded: pickles, code of a checkpoint, headers of any size. Oracles: syntax trees, and a limit."""

import ast
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from faser.engine.execution.models.sources import SafetensorsSource
from faser.errors import ModelError

PACKAGE = Path(__file__).parent.parent / "faser"

# Modules that run what they read, and functions that do so.
_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
_CALLS = {"eval", "exec", "torch.load", "torch.jit.load", "torch.hub.load", "yaml.load", "yaml.unsafe_load"}
_KEYWORDS = {"allow_pickle", "trust_remote_code"}


def dangers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.partition(".")[0] in _MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in _MODULES:
            yield f"from {node.module}"
        elif isinstance(node, ast.Call):
            if (called := ast.unparse(node.func)) in _CALLS and not _reads_weights_only(node):
                yield called
            for keyword in node.keywords:
                if keyword.arg in _KEYWORDS and ast.unparse(keyword.value) != "False":
                    yield keyword.arg


def _reads_weights_only(call: ast.Call) -> bool:
    """torch.load with weights_only builds tensors and plain containers alone, and refuses everything else."""
    stated = {each.arg: ast.unparse(each.value) for each in call.keywords}
    return ast.unparse(call.func) == "torch.load" and stated.get("weights_only") == "True"


@pytest.mark.parametrize(
    "source, found",
    [
        ("import pickle", ["pickle"]),
        ("from joblib import load", ["from joblib"]),
        ("def f():\n import torch\n return torch.load('x')", ["torch.load"]),
        ("torch.load('x', weights_only=False)", ["torch.load"]),
        ("torch.load('x', weights_only=True)", []),
        ("np.load('x', allow_pickle=True)", ["allow_pickle"]),
        ("AutoModel.from_pretrained('x', trust_remote_code=flag)", ["trust_remote_code"]),
        ("np.load('x', allow_pickle=False); yaml.safe_load('x'); model.eval()", []),
    ],
)
def test_the_search_finds_what_is_planted(source: str, found: list[str]) -> None:
    assert list(dangers(ast.parse(source))) == found


def test_nothing_that_runs_what_it_reads_is_used() -> None:
    found = {
        str(path.relative_to(PACKAGE)): list(dangers(ast.parse(path.read_text(encoding="utf-8"))))
        for path in PACKAGE.rglob("*.py")
    }
    assert len(found) > 200
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("announced", [100_000_001, 1 << 33, (1 << 63) - 1, (1 << 64) - 1])
def test_a_header_of_any_size_is_refused_and_not_read(tmp_path: Path, announced: int) -> None:
    """The file has as many bytes as the header announces, up to a hole of 200 MB, so only a limit refuses it."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", announced) + b'{"a":')
        file.truncate(min(announced + 8, 200_000_000))
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or cut short: .*(?i:header)"):
        SafetensorsSource(tmp_path)
