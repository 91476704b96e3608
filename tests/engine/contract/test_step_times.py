"""Step times: tables, what they say between and above the measured row counts, files."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.engine.contract.step_times import (
    CostTable,
    ExpertCosts,
    Role,
    StepTimes,
)
from faser.errors import ConfigError

TABLE = CostTable(rows=(1, 2, 4, 8), seconds=(0.010, 0.010, 0.014, 0.030), kv_token_s=1e-6, kv_row_token_s=1e-7)
PASS = CostTable(rows=(1, 4), seconds=(0.001, 0.002))


def _content(roles: str) -> str:
    """Of a file whose format is today's."""
    today = json.loads(StepTimes(tables={Role.STEP: TABLE}).to_json())["format"]
    return f'{{"format": {today}, "measured_at": "", "busy_share": 0, "roles": {roles}}}'


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
