"""The wheel for a platform: made of the one for any, the same bytes every time."""

import os
import shutil
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("elftools", reason="make deploy-tools installs it")

from deploy.wheel.__main__ import build_pure
from deploy.wheel.audit import faults
from deploy.wheel.pack import pack, requirements
from tests.deploy.exported import DEPLOY

ROOT = DEPLOY.parent
EPOCH_S = 1_700_000_001
PLATFORM_TAG = "py3-none-manylinux_2_28_x86_64"


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel for any platform, built of this checkout."""
    return build_pure(ROOT, tmp_path_factory.mktemp("pure"), EPOCH_S)


def test_the_wheel_for_any_platform_has_every_file_of_the_package_and_no_other(pure: Path) -> None:
    assert pure.name.endswith("-py3-none-any.whl")
    assert faults(pure, ROOT / "faser") == []
    assert [each for each in requirements(pure) if each.startswith("torch>=")] != []


def test_leftovers_of_the_checkout_stay_out(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    package = tmp_path / "faser"
    for leftover in ("__pycache__/x.pyc", "kernels/cpu/native/prebuilt/avx2-stale.so"):
        (package / leftover).parent.mkdir(parents=True)
        (package / leftover).touch()
    for folder in ("", "kernels", "kernels/cpu"):
        (package / folder / "__init__.py").touch()
    built = build_pure(tmp_path, tmp_path / "out", EPOCH_S)
    names = zipfile.ZipFile(built).namelist()
    assert "faser/__init__.py" in names
    assert [name for name in names if name.endswith((".so", ".pyc"))] == []


def test_packing_twice_makes_the_same_bytes_whatever_the_mode_of_new_files(pure: Path, tmp_path: Path) -> None:
    made = []
    for mask in (0o022, 0o077):
        out = tmp_path / str(mask)
        out.mkdir()
        before = os.umask(mask)
        try:
            made.append(pack(pure, {"a-1.so": b"library"}, {"b.json": "{}"}, out, epoch_s=EPOCH_S))
        finally:
            os.umask(before)
    assert made[0].name.endswith(f"-{PLATFORM_TAG}.whl")
    assert made[0].read_bytes() == made[1].read_bytes()


def test_what_is_packed_is_dated_executable_where_it_is_a_library_and_tagged(pure: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(pack(pure, {"a-1.so": b"library"}, {"b.json": "{}"}, tmp_path, epoch_s=EPOCH_S)) as made:
        assert {each.date_time for each in made.infolist()} == {
            (2023, 11, 14, 22, 13, 20)
        }  # in steps of two seconds
        info = made.getinfo("faser/kernels/cpu/native/prebuilt/a-1.so")
        assert (info.external_attr >> 16) & 0o777 == 0o755
        (about,) = [name for name in made.namelist() if name.endswith("/WHEEL")]
        lines = made.read(about).decode().splitlines()
        assert [line for line in lines if line.startswith(("Tag", "Root"))] == [
            "Root-Is-Purelib: false",
            f"Tag: {PLATFORM_TAG}",
        ]
        assert [name for name in made.namelist() if name.endswith(".dist-info/sboms/b.json")] != []
