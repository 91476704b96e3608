"""A file is replaced as a whole or not at all, and nothing else is left in its folder for long."""

import os
import time
from pathlib import Path

import pytest

from faser.files import remove_stale, replacing, write_atomically


def test_text_is_written_into_folders_that_did_not_exist(tmp_path: Path) -> None:
    path = tmp_path / "one" / "two" / "file.json"
    write_atomically(path, "é\n")
    write_atomically(path, "ö\n")
    assert path.read_bytes() == "ö\n".encode()
    assert os.listdir(path.parent) == ["file.json"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write_half() -> None:
        with replacing(path) as new:
            new.write_text("half")
            assert path.read_text() == "old"
            raise ValueError("halfway")

    with pytest.raises(ValueError, match="halfway"):
        write_half()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def age(path: Path, hours: float) -> None:
    then = time.time() - 3600 * hours
    os.utime(path, (then, then))


def test_what_killed_writers_left_is_removed_and_what_is_being_written_stays(tmp_path: Path) -> None:
    for name in (".a-1.tmp", ".a-2.tmp", "a.so", "tmpold"):
        (tmp_path / name).write_text("half")
    for name in ("dir-old", "dir-new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "download").write_text("half")
        age(tmp_path / name, 2)
    for old in (".a-1.tmp", "a.so", "tmpold", "dir-old/download"):
        age(tmp_path / old, 2)
    age(tmp_path / "dir-old", 2)
    remove_stale(tmp_path, ".*.tmp", "tmp*", "dir-*")
    assert sorted(os.listdir(tmp_path)) == [".a-2.tmp", "a.so", "dir-new"]


def test_a_folder_that_does_not_exist_has_nothing_stale(tmp_path: Path) -> None:
    remove_stale(tmp_path / "nowhere", "*")
    assert os.listdir(tmp_path) == []
