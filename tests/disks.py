"""Disks that are too small or read-only. Mounting them needs root; tests skip themselves where that is missing."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def filling_up(place: Path, *, kib: int) -> Iterator[Path]:
    """A file system of so many KiB at place."""
    place.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(place))
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextmanager
def read_only(place: Path, content: Path | None = None) -> Iterator[Path]:
    """A file system that cannot be written to, with a copy of a folder in it, or with nothing."""
    place.mkdir()
    _mount("-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place))
    try:
        if content is not None:
            shutil.copytree(content, place, dirs_exist_ok=True)
        _mount("-o", "remount,ro", str(place))
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def _mount(*arguments: str) -> None:
    if shutil.which("mount") is None:
        pytest.skip("there is no mount")
    if subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a file system needs root")
