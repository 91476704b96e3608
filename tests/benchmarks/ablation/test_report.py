"""The report says what was found, next to what was published, and says it loudly where answers differ."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.ablation.report import Run, write
from tests.benchmarks.ablation.loaded_engine import LoadedEngine
from tests.benchmarks.ablation.test_campaign import campaign_of, runs_of

ABOUT: dict[str, Any] = {"command": "python -m benchmarks ablation", "conditions": {"drafter": "small"}}


def some_runs() -> list[Run]:
    return runs_of(campaign_of(LoadedEngine(), loads=(0.5, 2.0)))


def test_the_file_holds_every_run_and_is_whole_at_any_time(tmp_path: Path) -> None:
    runs = some_runs()
    for count in range(1, len(runs) + 1):
        write(tmp_path, ABOUT, runs[:count])
        found = json.loads((tmp_path / "ablation.json").read_text())
        assert len(found["runs"]) == count
        assert found["about"] == ABOUT
    assert not list(tmp_path.glob("*.tmp"))


def test_answers_that_differ_are_said_loudly(tmp_path: Path) -> None:
    runs = some_runs()
    write(tmp_path, ABOUT, runs)
    assert "token for token" in (tmp_path / "ablation.md").read_text()
    write(tmp_path, ABOUT, [replace(runs[0], different=3), *runs[1:]])
    assert "**3 OF " in (tmp_path / "ablation.md").read_text()
