"""What a call on the GPU machine does before it measures: the load is checked, unpacked and put in place."""

import ast
import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks.gpu.travel import day
from benchmarks.gpu.travel.day import environment, main, receive, settle, share

GROUP = {"child_paths": {"k.cubin": "/elsewhere/tmp/KEY/k.cubin", "k.json": "/elsewhere/tmp/KEY/k.json"}}
ARCHIVES = {
    "packages": {"packages/tvm_ffi/__init__.py": "x = 1", "packages/tvm_ffi-1.dist-info/METADATA": ""},
    "triton": {"triton/KEY/__grp__k.json": json.dumps(GROUP), "triton/KEY/k.cubin": "code"},
    "vllm": {"vllm/vllm/__init__.py": ""},
}


@pytest.fixture
def load(tmp_path: Path) -> Path:
    folder, listed = tmp_path / "load", []
    folder.mkdir()
    for name, members in ARCHIVES.items():
        whole = io.BytesIO()
        with tarfile.open(fileobj=whole, mode="w:xz") as packed:
            for member, content in members.items():
                about = tarfile.TarInfo(member)
                about.size = len(content)
                packed.addfile(about, io.BytesIO(content.encode()))
        (folder / f"{name}.tar.xz").write_bytes(whole.getvalue())
        listed.append({"name": f"{name}.tar.xz", "sha256": hashlib.sha256(whole.getvalue()).hexdigest()})
    (folder / "manifest.json").write_text(json.dumps({"archives": listed, "shared": ["tvm_ffi*"]}))
    return folder


def test_archives_are_unpacked_once_and_anew_where_they_are_others(load: Path, tmp_path: Path) -> None:
    """Planted: an archive of an earlier bundle taken for this one's."""
    home = tmp_path / "home"
    assert list(receive(load, home)) == [f"{name}.tar.xz" for name in ARCHIVES]
    assert list(receive(load, home)) == []
    (home / "vllm.tar.xz.done").write_text("of another bundle")
    assert list(receive(load, home)) == ["vllm.tar.xz"]


def test_a_damaged_archive_ends_the_call(load: Path, tmp_path: Path) -> None:
    part = load / "packages.tar.xz"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(SystemExit, match=r"the load cannot be used: packages\.tar\.xz is damaged"):
        main(["a", "--load", str(load), "--home", str(tmp_path / "home"), "--archive", "a.tar.gz"])


def test_tritons_groups_name_the_files_of_this_machine(load: Path, tmp_path: Path) -> None:
    """Bug seen caught: the paths of the machine that compiled them, with which Triton compiles anew."""
    home = tmp_path / "home"
    list(receive(load, home))
    settle(home / "triton")
    found = json.loads((home / "triton/KEY/__grp__k.json").read_text())["child_paths"]
    assert found == {name: str(home / "triton" / "KEY" / name) for name in GROUP["child_paths"]}
    assert Path(found["k.cubin"]).read_text() == "code"


def test_vllm_finds_the_packages_that_both_import(load: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    list(receive(load, home))
    for _ in range(2):
        share(load, home)
    assert (home / "vllm" / "tvm_ffi" / "__init__.py").read_text() == "x = 1"
    assert (home / "vllm" / "tvm_ffi-1.dist-info" / "METADATA").exists()


def test_packages_modules_and_kernels_of_the_load_are_found(
    load: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/before")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    assert "TRITON_CACHE_DIR" not in environment(tmp_path)
    list(receive(load, tmp_path))
    found = environment(tmp_path)
    assert found["PYTHONPATH"].split(":")[1:] == [str(tmp_path / "packages"), "/before"]
    assert found["FASER_CACHE_DIR"] == str(tmp_path / "cache")
    assert found["TRITON_CACHE_DIR"] == str(tmp_path / "triton")


def test_it_starts_with_nothing_but_pythons_own_library() -> None:
    tree = ast.parse(Path(day.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names
