"""A file is replaced as a whole or not at all, and nothing else is left in its folder."""

import os
from pathlib import Path

import pytest

from faser.files import replacing, write_atomically


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
