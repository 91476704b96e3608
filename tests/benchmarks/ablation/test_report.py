"""The report says what was found, next to what was published, and says it loudly where answers differ."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.ablation.drive import ARMS, BASE, FLOOR
from benchmarks.ablation.report import Run, write
from tests.benchmarks.ablation.loaded_engine import LoadedEngine
from tests.benchmarks.ablation.test_campaign import campaign_of, runs_of

ABOUT: dict[str, Any] = {"command": "python -m benchmarks.ablation", "conditions": {"drafter": "small"}}


def some_runs() -> list[Run]:
    return runs_of(campaign_of(LoadedEngine(), loads=(0.5, 2.0)))


def test_every_arm_has_its_line_at_every_load_beside_the_published_figures(tmp_path: Path) -> None:
    rows = write(tmp_path, ABOUT, some_runs())
    text = (tmp_path / "ablation.md").read_text()
    assert len(rows) == 2 * len(ARMS)
    for name in (arm.name for arm in ARMS):
        tables = 1 + (name != BASE) + (name in ("+lengths", "+overlap"))
        assert text.count(f"\n| {name} | ") == 2 * tables
    assert "## Load 0.5 of capacity" in text
    assert "- drafter: small" in text
    assert "arXiv 2604.20503" in text
    assert all(figure in text for figure in ("1.35x", "1.60x", "1.53x", "1.92x"))


def test_the_file_holds_every_run_and_is_whole_at_any_time(tmp_path: Path) -> None:
    runs = some_runs()
    for count in range(1, len(runs) + 1):
        write(tmp_path, ABOUT, runs[:count])
        found = json.loads((tmp_path / "ablation.json").read_text())
        assert len(found["runs"]) == count
        assert found["about"] == ABOUT
    assert not list(tmp_path.glob("*.tmp"))


def test_pictures_are_there_for_every_load_and_shown(tmp_path: Path) -> None:
    write(tmp_path, ABOUT, some_runs())
    text = (tmp_path / "ablation.md").read_text()
    for name in ("latency_0.5.svg", "latency_2.svg", "tpot_0.5.svg", "tpot_2.svg"):
        drawn = (tmp_path / name).read_text()
        assert drawn.startswith("<svg")
        assert "+overlap" in drawn
        assert f"({name})" in text


def test_answers_that_differ_are_said_loudly(tmp_path: Path) -> None:
    runs = some_runs()
    write(tmp_path, ABOUT, runs)
    assert "token for token" in (tmp_path / "ablation.md").read_text()
    write(tmp_path, ABOUT, [replace(runs[0], different=3), *runs[1:]])
    assert "**3 OF " in (tmp_path / "ablation.md").read_text()


def test_arms_are_compared_with_the_base_that_was_named_and_nothing_was_published_of_text_drafts(
    tmp_path: Path,
) -> None:
    runs = [replace(run, arm="default" if run.arm == BASE else run.arm) for run in some_runs()]
    write(tmp_path, ABOUT, [run for run in runs if run.arm in ("default", FLOOR)], base=FLOOR)
    text = (tmp_path / "ablation.md").read_text()
    assert "throughput over off" in text
    assert text.count("Against off: ") == text.count("\n| off | ") == 2
    assert text.count("\n| default | ") == 4
    assert "2604.20503" not in text
