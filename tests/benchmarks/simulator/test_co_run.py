"""Two lanes slow each other down until one is done, then the other is alone; by how much depends on the step.

Oracles: small steps of time, and lines drawn by hand between the points of the grid.
"""

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulator.co_run import FACTORS, InterferenceTable, Matrix
from faser.errors import ConfigError

CONSTANT = {"share": 0.5, "verify": 1.6, "draft": 1.9, "verify_alone": 1.4, "draft_alone": 1.5}
LANES = InterferenceTable.constant(**CONSTANT)
ROWS, CONTEXTS = (4, 16, 100), (64, 1024, 3000)


def matrix(seed: int) -> Matrix:
    drawn = np.random.default_rng(seed).uniform(1, 3, size=(len(CONTEXTS), len(ROWS)))
    return tuple(tuple(line) for line in drawn.tolist())


GRID = InterferenceTable(
    share=0.25,
    rows=ROWS,
    contexts=CONTEXTS,
    verify=matrix(1),
    draft=matrix(2),
    verify_alone=matrix(3),
    draft_alone=matrix(4),
)


def stepped(verify_s: float, draft_s: float, *, parts: int = 200_000) -> float:
    """Both lanes advance by the speed of the moment, in small steps of time."""
    quantum = (verify_s + draft_s) * 4 / parts
    left, elapsed = [verify_s, draft_s], 0.0
    while max(left) > 0:
        both = min(left) > 0
        left[0] -= quantum / CONSTANT["verify" if both else "verify_alone"]
        left[1] -= quantum / CONSTANT["draft" if both else "draft_alone"]
        elapsed += quantum
    return elapsed


@pytest.mark.parametrize(("verify_s", "draft_s"), [(1.0, 0.2), (0.2, 1.0), (1.0, 1.0), (0.7, 0.6)])
def test_the_time_is_that_of_lanes_advanced_in_small_steps(verify_s: float, draft_s: float) -> None:
    found = LANES.one(verify_s, draft_s, rows=7, context=70)
    assert found == pytest.approx(stepped(verify_s, draft_s), rel=1e-3)


def test_an_empty_lane_slows_nothing_down() -> None:
    assert LANES.one(1.0, 0.0, rows=1, context=1) == pytest.approx(CONSTANT["verify_alone"])
    assert LANES.one(0.0, 1.0, rows=1, context=1) == pytest.approx(CONSTANT["draft_alone"])
    assert LANES.one(0.0, 0.0, rows=1, context=1) == 0.0


def test_lanes_that_do_not_disturb_each_other_take_as_long_as_the_longer() -> None:
    free = InterferenceTable.constant(share=0.5, verify=1.0, draft=1.0, verify_alone=1.0, draft_alone=1.0)
    verify_s, draft_s = np.array([1.0, 2.0]), np.array([3.0, 0.5])
    assert free.seconds(verify_s, draft_s, np.array([5, 500]), 10.0) == pytest.approx([3.0, 2.0])


def on_a_line(at: float, points: Sequence[int], values: Sequence[float]) -> float:
    """Over the logarithm; beyond the ends what stands there."""
    if at <= points[0]:
        return values[0]
    for (a, left), (b, right) in itertools.pairwise(zip(points, values, strict=True)):
        if at <= b:
            part = (math.log(at) - math.log(a)) / (math.log(b) - math.log(a))
            return (1 - part) * left + part * right
    return values[-1]


def by_hand(values: Sequence[Sequence[float]], rows: int, context: float) -> float:
    return on_a_line(context, CONTEXTS, [on_a_line(rows, ROWS, line) for line in values])


def eased(alone: Matrix, busy: Matrix) -> list[list[float]]:
    return [
        [a / b for a, b in zip(alone_line, busy_line, strict=True)]
        for alone_line, busy_line in zip(alone, busy, strict=True)
    ]


@pytest.mark.parametrize("context", [1, 64, 65, 500.5, 1024, 2000, 3000, 9000])
def test_between_measured_steps_factors_lie_on_lines_and_beyond_them_they_stay(context: float) -> None:
    rows = np.array([[1, 2, 4, 5], [9, 16, 17, 64], [99, 100, 101, 5000]])
    found = GRID.factors(rows, context)
    wanted = (
        GRID.verify,
        GRID.draft,
        eased(GRID.verify_alone, GRID.verify),
        eased(GRID.draft_alone, GRID.draft),
    )
    assert found.shape == (4, *rows.shape)
    for got, values in zip(found, wanted, strict=True):
        by_line = [[by_hand(values, each, context) for each in line] for line in rows.tolist()]
        assert got == pytest.approx(np.array(by_line))


def test_a_measured_step_has_exactly_what_was_measured() -> None:
    """Oracle: constant lanes of one cell. Caught: rows and contexts swapped, a neighbour's line."""
    for (i, context), (j, rows) in itertools.product(enumerate(CONTEXTS), enumerate(ROWS)):
        cell = InterferenceTable.constant(share=0.25, **{name: getattr(GRID, name)[i][j] for name in FACTORS})
        for verify_s, draft_s in ((1.0, 0.3), (0.3, 1.0)):
            found = GRID.one(verify_s, draft_s, rows=rows, context=context)
            assert found == pytest.approx(cell.one(verify_s, draft_s, rows=1, context=1))


def test_many_steps_at_once_take_what_each_takes_by_itself() -> None:
    rows = np.array([[3, 20], [60, 400]])
    verify_s, draft_s = np.array([[1.0, 2.0], [3.0, 0.5]]), np.array([[0.5, 2.5], [3.0, 2.0]])
    found = GRID.seconds(verify_s, draft_s, rows, 700.0)
    for at in itertools.product(range(2), range(2)):
        one = GRID.one(float(verify_s[at]), float(draft_s[at]), rows=int(rows[at]), context=700.0)
        assert found[at] == pytest.approx(one)


def test_lanes_can_be_copied_and_compared() -> None:
    assert copy.deepcopy(GRID) == GRID
    assert replace(GRID, share=0.5) != GRID


@pytest.mark.parametrize("field", ["share", "verify", "draft", "verify_alone", "draft_alone"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_what_cannot_be_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=str(value)):
        InterferenceTable.constant(**{**CONSTANT, field: value})


@pytest.mark.parametrize(
    ("field", "points", "complaint"),
    [
        ("rows", (), "rows of a co-run are"),
        ("rows", (0, 4, 8), "rows of a co-run are"),
        ("rows", (4, 4, 8), "rows of a co-run are"),
        ("contexts", (64, 32, 128), "contexts of a co-run are"),
        ("contexts", (64, 128), "verify of a co-run has lines"),
        ("rows", (4, 8), "verify of a co-run has lines"),
    ],
)
def test_a_grid_that_is_none_is_refused(field: str, points: tuple[int, ...], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        replace(GRID, **{field: points})  # type: ignore[arg-type]
