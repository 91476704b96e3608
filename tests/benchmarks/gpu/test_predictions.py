"""Predictions name figures that phases have, and a miss is said.

Planted: both ends of a range left out; the range of another cell; the table on another device.
"""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.phases import PHASES, RUNS
from benchmarks.gpu.plan import ON_DEVICE
from benchmarks.gpu.predictions import PREDICTIONS, judged
from benchmarks.gpu.record import Folder, Record
from benchmarks.gpu.report import page


def row(sequences: int, median_ms: float) -> dict[str, Any]:
    about = {"model": "draft", "way": "chosen", "sequences": sequences}
    return {**about, "bare_ms": {"median": median_ms}}


@pytest.mark.parametrize(
    "median_ms, said", [(0.54, "MISSED"), (0.55, ""), (0.8, ""), (0.81, "MISSED"), (1.42, "MISSED")]
)
def test_a_figure_outside_its_range_is_a_miss(median_ms: float, said: str) -> None:
    (found,) = judged({"passes": {"rows": [row(1, median_ms), row(32, 9.0)]}}, "NVIDIA H200")
    assert (found["cell"], found["measured"], found[""]) == (
        "model draft, way chosen, sequences 1",
        median_ms,
        said,
    )


def test_predictions_are_of_phases_of_the_three_calls_and_of_cells_that_they_measure() -> None:
    called = {phase for run in "abcd" for phase in RUNS[run].seconds}
    assert {each.phase for each in PREDICTIONS} <= called <= {phase.name for phase in PHASES}
    sizes = {
        "plain": ON_DEVICE.batches,
        "attention": ON_DEVICE.attention_batches,
        "passes": ON_DEVICE.pass_batches,
        "verify": ON_DEVICE.verify_batches,
        "cycle": ON_DEVICE.policy_batches,
        "policies": ON_DEVICE.policy_batches,
        "lanes": ON_DEVICE.lane_batches,
        "overlap": ON_DEVICE.overlap_batches,
    }
    for each in PREDICTIONS:
        other = {"tokens": ON_DEVICE.prompt_lengths, "processors": ON_DEVICE.lane_counts}
        for name, value in each.where.items():
            known = sizes.get(each.phase) if name == "sequences" else other.get(name)
            assert known is None or value in known, each
        assert each.least < each.most, each


@pytest.mark.parametrize(
    "device, median_ms, said",
    [
        ("NVIDIA H200", 1.0, "| MISSED |"),
        ("NVIDIA H100 80GB HBM3", 1.0, "| 0.55 to 1.16 | 1 |  |"),
        ("NVIDIA H100 80GB HBM3", 1.2, "| MISSED |"),
        ("cpu", 1.0, "Predictions are of H200 and H100; this is cpu."),
    ],
)
def test_of_another_device_more_time_is_expected_or_nothing(device: str, median_ms: float, said: str) -> None:
    records = [
        Record(phase="environment", dry_run=False, complete=True, result={"device": {"name": device}}),
        Record(phase="passes", dry_run=False, complete=True, result={"rows": [row(1, median_ms)]}),
    ]
    text = page(records, dry_run=False).partition("## Predictions")[2]
    assert said in text


def test_a_command_joins_runs_and_prints_what_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run's folder, then of the folder that it wrote. Planted: results of a folder left out."""
    run, filed = tmp_path / "run", tmp_path / "filed"
    folder = Folder(run, dry_run=False)
    about = {"device": {"name": "NVIDIA H200"}}
    folder.save(Record(phase="environment", dry_run=False, complete=True, result=about))
    rows = [row(1, 1.42), row(8, 0.7)]
    folder.save(Record(phase="passes", dry_run=False, complete=True, result={"rows": rows}))
    for source, out in ((run, filed), (filed, tmp_path / "again")):
        assert main(["report", str(source), "-o", str(out)]) == 0
        said = capsys.readouterr().out
        missed = "MISSED: passes, model draft, way chosen, sequences 1: 1.42 where 0.55 to 0.8 was predicted"
        assert missed in said
        assert "1 of 2 predictions held" in said
    assert (filed / "report.md").read_text() == (tmp_path / "again" / "report.md").read_text()
