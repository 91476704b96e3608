"""Predictions name figures that phases have, and a miss is said.

Planted: both ends of a range left out; the range of another cell; the table on another device.
"""

from typing import Any

import pytest

from benchmarks.gpu.phases import PHASES, RUNS
from benchmarks.gpu.plan import ON_DEVICE
from benchmarks.gpu.predictions import PREDICTIONS, judged
from benchmarks.gpu.record import Record
from benchmarks.gpu.report import page


def row(sequences: int, median_ms: float) -> dict[str, Any]:
    return {"sequences": sequences, "bare_ms": {"median": median_ms}}


@pytest.mark.parametrize(
    "median_ms, said", [(0.54, "MISSED"), (0.55, ""), (0.8, ""), (0.81, "MISSED"), (1.42, "MISSED")]
)
def test_a_figure_outside_its_range_is_a_miss(median_ms: float, said: str) -> None:
    (found,) = judged({"draft": {"draft bare": [row(1, median_ms), row(32, 9.0)]}})
    assert (found["cell"], found["measured"], found[""]) == ("sequences 1", median_ms, said)


def test_predictions_are_of_phases_of_the_three_calls_and_of_cells_that_they_measure() -> None:
    called = {phase for run in "abc" for phase in RUNS[run].seconds}
    assert {each.phase for each in PREDICTIONS} <= called <= {phase.name for phase in PHASES}
    sizes = {
        "plain": ON_DEVICE.batches,
        "draft": ON_DEVICE.batches,
        "verify": ON_DEVICE.verify_batches,
        "cycle": ON_DEVICE.policy_batches,
        "policies": ON_DEVICE.policy_batches,
        "fp8": ON_DEVICE.fp8_batches,
        "overlap": ON_DEVICE.overlap_batches,
    }
    for each in PREDICTIONS:
        assert each.where["sequences"] in sizes[each.phase], each
        assert each.least < each.most, each


@pytest.mark.parametrize(
    "device, said",
    [("NVIDIA H200", "| draft"), ("NVIDIA H100 80GB HBM3", "Predictions are of an H200; this is NVIDIA H100")],
)
def test_another_device_is_named_apart(device: str, said: str) -> None:
    records = [
        Record(phase="environment", dry_run=False, complete=True, result={"device": {"name": device}}),
        Record(phase="draft", dry_run=False, complete=True, result={"draft bare": [row(1, 1.42)]}),
    ]
    text = page(records, dry_run=False).partition("## Predictions")[2]
    assert said in text
    assert ("MISSED" in text) == ("H200" in device)
