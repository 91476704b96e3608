"""Two lanes slow each other down until one is done, then the other is alone; by how much depends on the step.

Oracles: small steps of time, and lines drawn by hand between the points of the grid.

Step times: tables, what they say between and above the measured row counts, files.
"""

import copy
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.engine.contract.step_times import (
    FACTORS,
    CostTable,
    ExpertCosts,
    InterferenceTable,
    Matrix,
    Role,
    StepTimes,
)
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


TABLE = CostTable(rows=(1, 2, 4, 8), seconds=(0.010, 0.010, 0.014, 0.030), kv_token_s=1e-6, kv_row_token_s=1e-7)
PASS = CostTable(rows=(1, 4), seconds=(0.001, 0.002))


def _content(roles: str) -> str:
    """Of a file whose format is today's."""
    today = json.loads(StepTimes(tables={Role.STEP: TABLE}).to_json())["format"]
    return f'{{"format": {today}, "measured_at": "", "busy_share": 0, "roles": {roles}, "lanes": []}}'


@pytest.mark.parametrize("rows", [0, 1, 3, 8, 12, 5000])
def test_one_row_count_is_read_as_from_a_dense_table(rows: int) -> None:
    assert TABLE.seconds_at(rows, 700) == TABLE.dense(9000)[rows] + 1e-6 * 700
    assert TABLE.seconds_at(rows, 700, 3000) == TABLE.dense(9000)[rows] + 1e-6 * 700 + 1e-7 * 3000


@given(st.lists(st.floats(1e-3, 10), min_size=1, max_size=9))
def test_a_table_is_the_nearest_one_that_does_not_fall(medians: list[float]) -> None:
    table = CostTable.measured(dict(enumerate(medians, 1)))
    count = len(medians)
    for at, value in enumerate(table.seconds):
        means = [[np.mean(medians[first : last + 1]) for last in range(at, count)] for first in range(at + 1)]
        assert value == pytest.approx(
            max(min(each) for each in means)
        )  # the max-min formula of isotonic regression


def test_one_slow_measurement_hides_no_slope_after_it() -> None:
    table = CostTable.measured({1: 0.0102, 2: 0.0100, 3: 0.0104})
    assert table.seconds == pytest.approx((0.0101, 0.0101, 0.0104))


@pytest.mark.parametrize(("row_s", "tile_s"), [(0.0002, 0.003), (0.0, 0.003), (0.0002, 0.0)])
def test_time_rises_at_the_edges_of_tiles(row_s: float, tile_s: float) -> None:
    """Oracle: a machine, where memory is the limit of the first tile. Two edges are measured on both sides.

    Planted bug: the first tile's rows, which take no time, count as those of others.
    """
    rows = np.arange(1, 65)
    true_s = 0.01 + row_s * np.maximum(rows - 6, 0) + tile_s * ((rows - 1) // 6)
    measured = {count: true_s.item(count - 1) for count in (1, 6, 7, 8, 12, 13, 32, 64)}
    table = CostTable.measured(measured, edges=tuple(range(6, 64, 6)))
    assert table.dense(64)[1:] == pytest.approx(true_s, rel=2e-3)


def test_edges_that_were_not_measured_leave_lines() -> None:
    table = CostTable(rows=(1, 8, 32), seconds=(0.01, 0.02, 0.08), edges=(6, 12, 18, 24, 30))
    assert table.dense(40) == pytest.approx(replace(table, edges=()).dense(40))


@given(
    st.lists(st.integers(1, 70), unique=True, max_size=8),
    st.lists(st.integers(1, 70), unique=True, min_size=1, max_size=9),
    st.data(),
)
def test_a_table_with_edges_never_falls_and_says_what_was_measured(
    edges: list[int], rows: list[int], data: st.DataObject
) -> None:
    drawn = data.draw(st.lists(st.floats(1e-3, 1.0), min_size=len(rows), max_size=len(rows)))
    table = CostTable(rows=(*sorted(rows),), seconds=(*sorted(drawn),), edges=(*sorted(edges),))
    dense = table.dense(80)
    assert (np.diff(dense[1:]) >= -1e-12).all()
    assert dense[list(table.rows)] == pytest.approx(table.seconds)


@pytest.mark.parametrize("edges", [(0, 6), (6, 6), (12, 6)])
def test_edges_that_do_not_ascend_are_refused(edges: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"edges of a cost table are \[\d+, 6\]; they must ascend"):
        replace(TABLE, edges=edges)


def test_tables_survive_a_file(tmp_path: Path) -> None:
    tiled = replace(TABLE, edges=(2, 6))
    times = StepTimes(tables={Role.STEP: tiled, Role.PASS: PASS}, measured_at="2026-11-22", busy_share=0.25)
    times.save(tmp_path / "deep" / "costs.json")
    assert StepTimes.load(tmp_path / "deep" / "costs.json") == times
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["costs.json"]


STORED_LANES = tuple(
    InterferenceTable(
        share=share,
        rows=(8, 32, 64),
        contexts=(64, 1024),
        verify=((1.5, 1.25, 1.1), (1.6, 1.3, 1.2)),
        draft=((1.9, 1.8, 1.7), (2.0, 1.9, 1.8)),
        verify_alone=((1.1, 1.0, 1.2), (1.1, 1.0, 1 / 3)),
        draft_alone=((1.3, 1.3, 1.4), (1.5, 1.3, 1.2)),
    )
    for share in (0.125, 0.5)
)


def test_lanes_survive_a_file_to_the_last_digit(tmp_path: Path) -> None:
    StepTimes(tables={Role.STEP: TABLE}, interference=STORED_LANES).save(tmp_path / "costs.json")
    again = StepTimes.load(tmp_path / "costs.json")
    assert again.interference == STORED_LANES
    assert again.interference[1].one(1.0, 0.4, rows=20, context=300) == STORED_LANES[1].one(
        1.0, 0.4, rows=20, context=300
    )


def test_a_file_from_when_lanes_were_one_number_a_share_is_refused(tmp_path: Path) -> None:
    content = json.loads(StepTimes(tables={Role.STEP: TABLE}).to_json())
    today = content["format"]
    content["lanes"] = [{"share": 0.5, "verify": 1.5, "draft": 1.9, "verify_alone": 1.1, "draft_alone": 1.2}]
    path = tmp_path / "costs.json"
    for number, complaint in ((3, "format is 3"), (today, "not a cost model")):
        path.write_text(json.dumps({**content, "format": number}))
        with pytest.raises(ConfigError, match=complaint):
            StepTimes.load(path)


def test_lanes_with_a_number_missing_are_refused(tmp_path: Path) -> None:
    content = json.loads(StepTimes(tables={Role.STEP: TABLE}, interference=STORED_LANES).to_json())
    content["lanes"][0]["draft"][1].pop()
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"costs\.json: draft of a co-run has lines of \[3, 2\] numbers"):
        StepTimes.load(path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not a cost model"),
        ("[]", "not a cost model"),
        ("{}", "not a cost model"),
        ('{"format": 1, "roles": {}}', "format is 1"),
        (_content("{}"), "no times of role step"),
        (_content('{"walk": {"rows": [1], "seconds": [1], "kv_token_s": 0, "kv_row_token_s": 0}}'), "walk"),
        (
            _content('{"step": {"rows": [2, 1], "seconds": [1, 1], "kv_token_s": 0, "kv_row_token_s": 0}}'),
            "must ascend",
        ),
        (
            _content('{"step": {"rows": [1, 2], "seconds": [1], "kv_token_s": 0, "kv_row_token_s": 0}}'),
            "2 row counts and 1 times",
        ),
        (
            _content('{"step": {"rows": [1, 2], "seconds": [2, 1], "kv_token_s": 0, "kv_row_token_s": 0}}'),
            "falls where rows rise",
        ),
        (
            _content('{"step": {"rows": [1], "seconds": [NaN], "kv_token_s": 0, "kv_row_token_s": 0}}'),
            "not a number of seconds",
        ),
        (
            _content('{"step": {"rows": [1], "seconds": [1], "kv_token_s": -1, "kv_row_token_s": 0}}'),
            "not a number of seconds",
        ),
        (
            _content('{"step": {"rows": [1], "seconds": [1], "kv_token_s": 0, "kv_row_token_s": -1}}'),
            "not a number of seconds",
        ),
        (_content('{"step": {"rows": [1], "seconds": [1], "kv_token_s": 0}}'), "KeyError: 'kv_row_token_s'"),
        (
            _content('{"step": {"rows": 3, "seconds": [1], "kv_token_s": 0, "kv_row_token_s": 0}}'),
            "not a cost model",
        ),
    ],
)
def test_a_file_that_is_no_cost_model_is_refused_by_name(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"costs\.json.*{complaint}"):
        StepTimes.load(path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json"):
        StepTimes.load(tmp_path / "none.json")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="costs"):
        StepTimes(tables={Role.STEP: TABLE}).save(tmp_path / "file" / "costs.json")


@pytest.mark.parametrize("busy_share", [-0.1, 1.1, float("nan")])
def test_a_busy_share_is_a_part(busy_share: float) -> None:
    with pytest.raises(ConfigError, match="must be from 0 to 1"):
        StepTimes(tables={Role.STEP: TABLE}, busy_share=busy_share)


def test_a_file_keeps_what_experts_cost(tmp_path: Path) -> None:
    experts = ExpertCosts(total=6144, per_row=384, expert_s=2.5e-6, row_share=0.9)
    times = StepTimes(tables={Role.STEP: replace(TABLE, experts=experts)})
    times.save(tmp_path / "costs.json")
    assert StepTimes.load(tmp_path / "costs.json") == times


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("per_row", 8, "8 of 8 experts"),
        ("per_row", 0, "0 of 8 experts"),
        ("expert_s", -1.0, "expert_s"),
        ("row_share", math.inf, "row_share"),
    ],
)
def test_costs_of_experts_out_of_range_are_refused(field: str, value: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        replace(ExpertCosts(total=8, per_row=2, expert_s=1e-6), **{field: value})
