"""What was predicted stands beside what was measured, and a miss says by how much."""

import pytest

from benchmarks.gpu.predictions import PREDICTIONS, Prediction
from benchmarks.gpu.record import Record
from benchmarks.gpu.report import page

ONE = Prediction(
    phase="plain",
    rows="target",
    cell=(("sampling", "greedy"), ("sequences", 8)),
    figure="times_floor",
    expected=1.5,
)


@pytest.mark.parametrize(
    ("times", "state"),
    [(1.5, "as predicted"), (1.64, "as predicted"), (1.8, "missed by +20%"), (1.2, "missed by -20%")],
)
def test_a_figure_is_judged_by_the_row_of_its_cell(times: float, state: str) -> None:
    """Planted: the first row, whatever its cell; a miss downwards taken for none."""
    rows = [
        {"sampling": "T 0.8", "sequences": 8, "times_floor": 9.0},
        {"sampling": "greedy", "sequences": 1, "times_floor": 9.0},
        {"sampling": "greedy", "sequences": 8, "times_floor": times},
    ]
    assert ONE.judged({"plain": {"target": rows}}) == (times, state)
    assert ONE.judged({"plain": {"target": rows[:2]}}) == (None, "not measured")
    assert ONE.judged({}) == (None, "not measured")


def test_the_report_has_both_side_by_side() -> None:
    first = PREDICTIONS[0]
    row = dict(first.cell) | {first.figure: first.expected * 2}
    result = {"target bare": [], first.rows: [row]}
    text = page([Record(phase="plain", dry_run=False, complete=True, result=result)], dry_run=False)
    cells = f"{first.about} | times_floor | {first.expected:g} | {2 * first.expected:.3g} | missed by +100%"
    assert f"| plain | {cells} |" in text
    assert "| overlap |" not in text.partition("What was predicted")[2]


def test_no_cell_is_predicted_twice() -> None:
    assert len({(each.phase, each.cell, each.figure) for each in PREDICTIONS}) == len(PREDICTIONS)
