"""What a call to a lent machine does before it measures: loads are checked, joined and unpacked, in any order."""

import ast
import hashlib
import io
import json
import random
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks.gpu.travel import day
from benchmarks.gpu.travel.day import environment, main, receive, unpack

CONTENT = random.Random(2).randbytes(5000)


@pytest.fixture
def loads(tmp_path: Path) -> list[Path]:
    """Two of them: `packages` comes with the first, `vllm` half with the first and half with the second."""
    archives = {"packages": {"packages/a.py": b"x = 1"}, "vllm": {"vllm/vllm.py": CONTENT}}
    files: dict[str, bytes] = {}
    for name, members in archives.items():
        whole = io.BytesIO()
        with tarfile.open(fileobj=whole, mode="w:xz") as packed:
            for member, content in members.items():
                about = tarfile.TarInfo(member)
                about.size = len(content)
                packed.addfile(about, io.BytesIO(content))
        data = whole.getvalue()
        halves = [data] if name == "packages" else [data[: len(data) // 2], data[len(data) // 2 :]]
        files |= {f"{name}.tar.xz.{place:03}": half for place, half in enumerate(halves)}
    contents = [["packages.tar.xz.000", "vllm.tar.xz.000"], ["vllm.tar.xz.001"]]
    listed = {
        f"load-{place}": [{"name": each, "sha256": hashlib.sha256(files[each]).hexdigest()} for each in names]
        for place, names in enumerate(contents, 1)
    }
    found = []
    for place, names in enumerate(contents, 1):
        folder = tmp_path / f"load-{place}"
        folder.mkdir()
        for each in names:
            (folder / each).write_bytes(files[each])
        (folder / "manifest.json").write_text(json.dumps({"loads": listed}))
        found.append(folder)
    return found


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_archive_in_two_loads_is_unpacked_once_both_are_there(
    loads: list[Path], order: tuple[int, int], tmp_path: Path
) -> None:
    """Planted: parts joined in the order in which they came; an archive unpacked by its first part."""
    home = tmp_path / "home"
    came = []
    for place in order:
        receive(loads[place], home)
        came.append(sorted(unpack(home)))
    assert came == ([["packages"], ["vllm"]] if order == (0, 1) else [[], ["packages", "vllm"]])
    assert (home / "vllm" / "vllm.py").read_bytes() == CONTENT
    assert list(unpack(home)) == []


def test_a_call_may_only_unpack(loads: list[Path], tmp_path: Path) -> None:
    assert main(["none", "--load", str(loads[0]), "--home", str(tmp_path / "home")]) == 0
    assert (tmp_path / "home" / "packages" / "a.py").exists()
    assert not (tmp_path / "home" / "results").exists()


def test_a_damaged_part_ends_the_call(loads: list[Path], tmp_path: Path) -> None:
    part = loads[0] / "packages.tar.xz.000"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(SystemExit, match=r"the load cannot be used: packages\.tar\.xz\.000 is damaged"):
        main(["a", "--load", str(loads[0]), "--home", str(tmp_path / "home"), "--archive", "a.tar.gz"])


def test_loads_of_two_bundles_do_not_mix(loads: list[Path], tmp_path: Path) -> None:
    receive(loads[0], tmp_path / "home")
    (loads[1] / "manifest.json").write_text(json.dumps({"loads": {}}))
    with pytest.raises(ValueError, match="load-2 belongs to another bundle"):
        receive(loads[1], tmp_path / "home")


def test_packages_and_modules_of_the_loads_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/before")
    found = environment(tmp_path)
    assert found["PYTHONPATH"].split(":")[1:] == [str(tmp_path / "packages"), "/before"]
    assert found["FASER_CACHE_DIR"] == str(tmp_path / "cache")


def test_it_starts_with_nothing_but_pythons_own_library() -> None:
    tree = ast.parse(Path(day.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names
