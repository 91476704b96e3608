"""What takes long to make is made once, and again where anything about it has changed."""

from pathlib import Path

import pytest

from benchmarks.gpu.travel.bundle import kept


class Maker:
    """content: of the one file that it makes. breaks: half-way."""

    def __init__(self, content: str = "one", *, breaks: bool = False) -> None:
        self.content = content
        self.breaks = breaks
        self.calls = 0

    def __call__(self, out: Path) -> None:
        self.calls += 1
        (out / "file").write_text(self.content)
        if self.breaks:
            raise ValueError("the network is gone")


def test_a_folder_is_made_once(tmp_path: Path) -> None:
    make, said = Maker(), list[str]()
    for _ in range(2):
        assert (kept(tmp_path / "x", "a", make, said.append) / "file").read_text() == "one"
    assert make.calls == 1
    assert said == ["x: is being made", "x: kept"]


def test_it_is_made_anew_of_something_else_and_where_a_file_has_changed_or_is_gone(tmp_path: Path) -> None:
    """Planted: a stamp that is taken for the files; what it is made of left out."""
    make = Maker()
    folder = kept(tmp_path / "x", "a", make, lambda _: None)
    kept(folder, "b", make, lambda _: None)
    assert make.calls == 2
    (folder / "file").write_text("another")
    kept(folder, "b", make, lambda _: None)
    assert (make.calls, (folder / "file").read_text()) == (3, "one")
    (folder / "file").rename(folder / "elsewhere")
    kept(folder, "b", make, lambda _: None)
    assert [each.name for each in folder.iterdir()] == ["file"]
    assert make.calls == 4


def test_what_was_broken_off_is_not_kept(tmp_path: Path) -> None:
    """Planted: made in its own place."""
    with pytest.raises(ValueError, match="the network is gone"):
        kept(tmp_path / "x", "a", Maker(breaks=True), lambda _: None)
    make = Maker("whole")
    assert (kept(tmp_path / "x", "a", make, lambda _: None) / "file").read_text() == "whole"
    assert make.calls == 1
