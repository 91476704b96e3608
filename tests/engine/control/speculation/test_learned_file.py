"""What drafts cost and gain, over restarts.

Planted bugs that these tests have caught: a file that is read whatever the step times are; a damaged file that
ends the start; a damaged file half of which is taken; an earlier run that counts as much as it did; a file that is
written at every rest.
"""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from faser.config.engine import EngineConfig
from faser.engine.build import build_engine
from faser.engine.control.speculation.learned_file import LearnedFile
from faser.engine.engine import Engine
from tests.engine.control.speculation.test_guard import World


class Learning:
    """Something to keep: a number."""

    def __init__(self, number: float = 0.0) -> None:
        self.number = number

    def saved(self) -> dict[str, Any]:
        return {"number": self.number}

    def restore(self, saved: dict[str, Any]) -> None:
        self.number = float(saved["number"])


def test_what_is_saved_is_there_after_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, after = tmp_path / "folder" / "a.learned.json", Learning()
    LearnedFile(path, Learning(3.5), times="monday").save()
    LearnedFile(path, after, times="monday")
    assert after.number == 3.5
    assert not caplog.records


def test_step_times_that_were_measured_anew_make_it_void(tmp_path: Path) -> None:
    path, after = tmp_path / "a.learned.json", Learning()
    LearnedFile(path, Learning(3.5), times="monday").save()
    LearnedFile(path, after, times="tuesday")
    assert after.number == 0.0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"3",
        b"\xff\xfe",
        b'{"format": 2, "times": "monday"}',
        b'{"format": 2, "times": "monday", "number": [1]}',
        b'{"format": 2, "times": "monday", "number": "x"}',
        b"[" * 100_000,
        b" " * (1 << 20) + b"{}",
    ],
)
def test_a_damaged_or_foreign_file_is_refused_with_one_line(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, learning = tmp_path / "a.learned.json", Learning(1.0)
    path.write_bytes(content)
    with caplog.at_level(logging.INFO):
        kept = LearnedFile(path, learning, times="monday")
    (line,) = [each.getMessage() for each in caplog.records]
    assert str(path) in line
    assert "ignoring" in line
    assert learning.number == 1.0
    kept.save()
    LearnedFile(path, learning, times="monday")
    assert len(caplog.records) == 1


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    kept = LearnedFile(tmp_path / "other.json", Learning(), times="")
    kept._path = tmp_path / "file" / "a.learned.json"
    kept.save()
    (line,) = [each.getMessage() for each in caplog.records]
    assert str(kept._path) in line


def test_it_is_written_once_a_minute_at_most(tmp_path: Path) -> None:
    now_s, learning, path = 0.0, Learning(1.0), tmp_path / "a.json"
    kept = LearnedFile(path, learning, times="", now=lambda: now_s)
    kept.rest()
    assert not path.exists()
    now_s = 61.0
    kept.rest()
    learning.number = 2.0
    now_s = 100.0
    kept.rest()
    assert json.loads(path.read_text())["number"] == 1.0
    now_s = 122.0
    kept.rest()
    assert json.loads(path.read_text())["number"] == 2.0


# Few rows: there is little to measure.
CONFIG = EngineConfig(
    backend="torch",
    dtype="float32",
    max_model_len=64,
    max_num_seqs=1,
    max_num_batched_tokens=16,
    kv_cache_memory=1 << 20,
    speculative_config={"method": "ngram", "num_speculative_tokens": 2},
)


def test_an_engine_keeps_it_beside_its_step_times(
    tiny_checkpoint: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def files() -> set[Path]:
        return set((own_cache / "cost").glob("*.learned.json"))

    def built() -> Engine:
        return build_engine(CONFIG, tiny_checkpoint, lambda _stage, _done, _total: None)[0]

    before = files()
    built().close()
    (path,) = files() - before
    content = json.loads(path.read_text())
    assert content["guards"] == {"faser": {}}
    assert len(content["prices"]["gaps"]) == 3
    path.write_text("{}")
    with caplog.at_level(logging.WARNING, "faser.engine"):
        built().close()
    assert [str(path) in each.getMessage() for each in caplog.records].count(True) == 1
    assert json.loads(path.read_text()).keys() == content.keys()


@pytest.mark.parametrize("gain", [0.93, 1.15])
def test_a_guard_begins_with_what_an_earlier_one_has_found(gain: float) -> None:
    before = World(gain=gain, num_sequences=16)
    before.run(6000)
    after, fresh = World(gain=gain, num_sequences=16, seed=5), World(gain=gain, num_sequences=16, seed=5)
    saved = json.loads(json.dumps(before.guard.saved()))
    after.guard.restore(saved)
    assert len(json.dumps(saved)) < 4096
    after.run(300)
    fresh.run(300)
    assert after.lost_s < 0.6 * fresh.lost_s


def test_what_an_earlier_run_found_gives_way_soon() -> None:
    before, after = World(gain=1.2, num_sequences=16), World(gain=0.9, num_sequences=16, seed=3)
    before.run(20_000)
    after.guard.restore(before.guard.saved())
    assert after.guard.saved()["5"][0] == 8 < before.guard.saved()["5"][0]
    after.run(2000)
    assert after.decided() is False


@pytest.mark.parametrize(
    "saved",
    [
        {"5": [1.0, 1.0]},
        {"5": [1.0] * 7},
        {"five": [1.0] * 6},
        {"5": [0.0] * 6},
        {"5": [1.0, 1.0, float("nan"), 1.0, 1.0, 1.0]},
        {"5": [1.0, 1.0, 1.0, 1.0, -1.0, 1.0]},
        {"5": None},
    ],
)
def test_a_guard_takes_nothing_of_what_is_damaged(saved: Any) -> None:
    world = World(gain=1.2, num_sequences=16)
    world.run(500)
    before = world.guard.saved()
    with pytest.raises((ValueError, TypeError)):
        world.guard.restore({"4": [5.0, 5.0, 1.0, 1.0, 5.0, 5.0], **saved})
    assert world.guard.saved() == before
