"""The bundle for a machine without a network, with a pip that only pretends."""

import io
import json
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.gpu.travel.bundle import is_used, main

MEMBERS = (
    "flashinfer/__init__.py",
    "flashinfer/data/csrc/norm.cu",
    "flashinfer/data/csrc/gdn/large.cu",
    "flashinfer/data/cutlass/include/large.h",
    "flashinfer/experimental/it/__init__.py",
    "flashinfer/experimental/it/large.cu",
)


class FakePip:
    """Writes wheels as pip would. breaks: at the second one."""

    def __init__(self, *, breaks: bool = False) -> None:
        self.asked: list[str] = []
        self.breaks = breaks

    def __call__(self, command: Sequence[str]) -> None:
        assert "--no-deps" in command
        package, wheels = command[-1], Path(command[command.index("--dest") + 1])
        if self.breaks and self.asked:
            raise ValueError("the network is gone")
        self.asked.append(package)
        wheels.mkdir(exist_ok=True)
        name, _, version = package.partition("==")
        with zipfile.ZipFile(wheels / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", "w") as wheel:
            for member in MEMBERS if name.startswith("flashinfer") else ("tvm_ffi/__init__.py",):
                wheel.writestr(member, member)


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A model, modules, and this project's own checkout."""
    model, modules = tmp_path / "model", tmp_path / "flashinfer-sm90a"
    (modules / "norm").mkdir(parents=True)
    (modules / "norm" / "norm.so").write_bytes(b"compiled")
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(range(256)) * 9000)
    return [str(tmp_path / "out"), "--xz-preset", "0", "--smollm2", str(model), "--modules", str(modules)]


def names_in(out: Path, name: str) -> set[str]:
    content = b"".join(part.read_bytes() for part in sorted(out.glob(f"{name}.tar.xz.*")))
    with tarfile.open(fileobj=io.BytesIO(content)) as file:
        return set(file.getnames())


def test_a_bundle_has_programs_packages_modules_and_model(arguments: list[str], tmp_path: Path) -> None:
    """Planted: sources that nothing is compiled from."""
    assert main(arguments, FakePip()) == 0
    out = tmp_path / "out"
    programs = names_in(out, "programs")
    assert {"pyproject.toml", "faser/__init__.py", "benchmarks/gpu/travel/bundle.py"} <= programs
    packaged = {each.removeprefix("packages/") for each in programs if each.startswith("packages/")}
    used = {each for each in MEMBERS if "large" not in each}
    assert packaged == used | {"tvm_ffi/__init__.py"}
    assert names_in(out, "modules") == {"cache/kernels/flashinfer-sm90a/norm/norm.so"}
    assert names_in(out, "model") == {"smollm2/config.json", "smollm2/model.safetensors"}
    manifest = json.loads((out / "manifest.json").read_text())
    assert set(manifest) == {"programs", "modules", "model"}
    for parts in manifest.values():
        for part in parts:
            assert (out / part["name"]).stat().st_size == part["bytes"]


def test_a_bundle_that_was_broken_off_goes_on_and_a_whole_one_is_kept(
    arguments: list[str], tmp_path: Path
) -> None:
    """Planted: wheels downloaded again; archives packed again."""
    with pytest.raises(SystemExit, match="the network is gone"):
        main(arguments, FakePip(breaks=True))
    again = FakePip()
    main(arguments, again)
    assert [each.partition("==")[0] for each in again.asked] == ["apache-tvm-ffi"]
    part = tmp_path / "out" / "model.tar.xz.000"
    before = part.stat().st_mtime_ns
    third = FakePip()
    main(arguments, third)
    assert not third.asked
    assert part.stat().st_mtime_ns == before


def test_without_modules_the_bundle_says_how_they_are_made(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*arguments[:-1], str(tmp_path / "nowhere")], FakePip())
    assert "faser env --build-kernels --arch 9.0a makes them" in capsys.readouterr().out
    assert not names_of(tmp_path / "out", "modules")


def names_of(out: Path, name: str) -> list[Path]:
    return list(out.glob(f"{name}.tar.xz*"))


def test_a_folder_that_is_no_checkpoint_is_refused(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(SystemExit, match=r"model is no checkpoint: it has no config.json"):
        main(arguments, FakePip())


def test_parts_are_no_larger_than_wanted_and_join_to_the_archive(tmp_path: Path) -> None:
    from benchmarks.gpu.travel.bundle import parts_of, split

    whole = tmp_path / "x.tar.xz.tmp"
    whole.write_bytes(bytes(range(250)))
    parts = split(whole, 100)
    assert [part.name for part in parts] == ["x.tar.xz.000", "x.tar.xz.001", "x.tar.xz.002"]
    assert b"".join(part.read_bytes() for part in parts) == bytes(range(250))
    assert parts_of(tmp_path, "x") == parts
    parts[0].unlink()
    assert parts_of(tmp_path, "x") == []


def test_other_packages_are_kept_whole() -> None:
    assert is_used("tvm_ffi/lib/libtvm_ffi.so")
    assert is_used("flashinfer/data/csrc/batch_prefill.cu")
    assert not is_used("flashinfer/data/include/flashinfer/norm.cuh")
