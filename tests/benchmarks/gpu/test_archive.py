"""The archive of a run: whole at any moment, small enough to come back, and joined with others."""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import archive as module
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.archive import pack, read_records
from benchmarks.gpu.record import Folder, Record


def results(path: Path, *records: Record, device: str | None = "H200") -> Folder:
    folder = Folder(path, dry_run=False)
    if device is not None:
        about = {"device": {"name": device}, "commit": "abc", "versions": {"torch": "2.11"}}
        folder.save(Record(phase="environment", dry_run=False, complete=True, result=about))
    for record in records:
        folder.save(record)
    folder.write("run.json", {"run": "a"})
    return folder


def packed(path: Path, *records: Record, device: str | None = "H200") -> Path:
    folder = results(path / "results", *records, device=device)
    pack(folder.path, path / "a.tar.gz")
    return path / "a.tar.gz"


def plain(seconds: float, **fields: Any) -> Record:
    return Record(phase="plain", dry_run=False, seconds=seconds, **fields)


def test_an_archive_has_the_results_and_logs_and_no_models(tmp_path: Path) -> None:
    folder = results(tmp_path / "out", plain(1.0, complete=True))
    (folder.path / "models").mkdir()
    (folder.path / "models" / "config.json").write_text("{}")
    (folder.path / "plain.log").write_bytes(b"a" * 300_000 + b"the end")
    (folder.path / ".plain.json-x.tmp").write_text("half")
    pack(folder.path, tmp_path / "out" / "a.tar.gz")
    with tarfile.open(tmp_path / "out" / "a.tar.gz") as found:
        assert sorted(found.getnames()) == ["a/environment.json", "a/plain.json", "a/plain.log", "a/run.json"]
        log = found.extractfile("a/plain.log")
        assert log is not None
        content = log.read()
    assert len(content) == 200_000
    assert content.endswith(b"the end")


def test_an_archive_that_is_too_large_is_refused_and_the_one_before_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug seen caught: written in its own place."""
    archive = packed(tmp_path, plain(1.0))
    before = archive.read_bytes()
    monkeypatch.setattr(module, "MOST_BYTES", len(before))
    results(tmp_path / "results", plain(2.0, result={str(each): each * 1.7 for each in range(500)}))
    with pytest.raises(ValueError, match=rf"a.tar.gz would have \d+ bytes; {len(before)} come back at most"):
        pack(tmp_path / "results", archive)
    assert archive.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["a.tar.gz"]


def test_half_an_archive_is_refused_by_name(tmp_path: Path) -> None:
    archive = packed(tmp_path, plain(1.0))
    archive.write_bytes(archive.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"a\.tar\.gz cannot be read"):
        read_records(archive)


def test_merging_takes_the_latest_complete_record_of_each_phase(tmp_path: Path) -> None:
    """Bug seen caught: the last archive wins whatever it holds."""
    first = packed(tmp_path / "1", plain(1.0, complete=True, result={"figure": 1}))
    second = packed(tmp_path / "2", plain(2.0, complete=True, result={"figure": 2}))
    third = packed(
        tmp_path / "3", plain(3.0, error="stopped"), Record(phase="verify", dry_run=False, skipped="late")
    )
    out = tmp_path / "out"
    assert main(["report", str(third), str(second), str(first), "-o", str(out)]) == 0
    found = json.loads((out / "plain.json").read_text())
    assert found["result"] == {"figure": 2}
    assert (found["device"]["name"], found["commit"], found["run"]) == ("H200", "abc", {"run": "a"})
    assert sorted(each.name for each in out.iterdir()) == [
        "environment.json",
        "plain.json",
        "report.md",
        "summary.json",
        "verify.json",
    ]
    assert "| verify | 0 | SKIPPED: late | 0 |" in (out / "report.md").read_text()
    assert json.loads((out / "summary.json").read_text())["device"]["name"] == "H200"
    assert main(["report", str(out), "-o", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "plain.json").read_text() == (out / "plain.json").read_text()


def test_archives_of_two_devices_are_not_merged(tmp_path: Path) -> None:
    one, other = packed(tmp_path / "1"), packed(tmp_path / "2", device="H100")
    with pytest.raises(SystemExit, match=r"of another device than those before it: \['H100', 'H200'\]"):
        main(["report", str(one), str(other), "-o", str(tmp_path / "out")])


def test_a_dry_run_is_not_merged_with_runs_on_a_device(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"a\.tar\.gz is a run on a device"):
        main(["report", str(packed(tmp_path)), "-o", str(tmp_path / "out"), "--dry-run"])


def test_an_archive_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"a\.tar\.gz holds no results"):
        main(["report", str(packed(tmp_path, device=None)), "-o", str(tmp_path / "out")])
