"""The cost model: tables, factors, files."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.engine.contract.interference import InterferenceTable
from faser.engine.contract.step_times import CostTable, Role
from faser.engine.control.timing.cost_model import CostModel
from faser.errors import ConfigError
from faser.types import STEP_ERROR_EDGES

TABLE = CostTable(rows=(1, 2, 4, 8), seconds=(0.010, 0.010, 0.014, 0.030), kv_token_s=1e-6)
PASS = CostTable(rows=(1, 4), seconds=(0.001, 0.002))


def _content(roles: str) -> str:
    """Of a file whose format is today's."""
    today = json.loads(CostModel({Role.STEP: TABLE}).to_json())["format"]
    return f'{{"format": {today}, "roles": {roles}, "lanes": []}}'


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def test_measured_counts_are_met_between_them_time_is_linear_and_above_it_goes_on_rising() -> None:
    costs = CostModel({Role.STEP: TABLE})
    assert costs.step_s(2) == pytest.approx(0.010)
    assert costs.step_s(3) == pytest.approx(0.012)
    assert costs.step_s(12) == pytest.approx(0.030 + 4 * (0.030 - 0.014) / 4)
    assert costs.step_s(5000) == pytest.approx(0.030 + 4992 * 0.004)


def test_tokens_in_the_cache_cost_what_the_slope_says() -> None:
    costs = CostModel({Role.STEP: TABLE})
    assert costs.step_s(4, 3000) == pytest.approx(0.014 + 0.003)


def test_an_array_of_row_counts_gives_what_each_gives_alone() -> None:
    costs = CostModel({Role.STEP: TABLE})
    rows = ints(1, 3, 7, 4000, 1)
    assert costs.step_s(rows, 10).tolist() == [costs.step_s(int(each), 10) for each in rows]


@given(st.dictionaries(st.integers(1, 300), st.floats(1e-6, 10), min_size=1, max_size=12))
def test_more_rows_are_never_predicted_to_be_faster(medians: dict[int, float]) -> None:
    costs = CostModel({Role.STEP: CostTable.measured(medians)})
    assert (np.diff(costs.step_s(np.arange(1, 700))) >= -1e-12).all()


@given(st.lists(st.floats(1e-3, 10), min_size=1, max_size=9))
def test_a_table_is_the_nearest_one_that_does_not_fall(medians: list[float]) -> None:
    table = CostTable.measured(dict(enumerate(medians, 1)))
    count = len(medians)
    for at, value in enumerate(table.seconds):
        means = [[np.mean(medians[first : last + 1]) for last in range(at, count)] for first in range(at + 1)]
        assert value == pytest.approx(
            max(min(each) for each in means)
        )  # the max-min formula of isotonic regression


def test_one_slow_measurement_hides_no_slope_behind_it() -> None:
    table = CostTable.measured({1: 0.0102, 2: 0.0100, 3: 0.0104})
    assert table.seconds == pytest.approx((0.0101, 0.0101, 0.0104))


def test_drafting_is_one_pass_per_token_of_the_longest_draft_with_those_that_go_on() -> None:
    costs = CostModel({Role.STEP: TABLE, Role.PASS: PASS})
    expected = costs.pass_s(3) + costs.pass_s(2) + costs.pass_s(2) + costs.pass_s(1)
    assert costs.draft_s(ints(1, 4, 0, 3), ints(0, 0, 9, 0)) == pytest.approx(expected)


def test_catching_up_is_rows_of_the_first_pass_spread_over_the_horizon() -> None:
    costs = CostModel({Role.STEP: TABLE, Role.PASS: PASS})
    plain = costs.draft_s(ints(2, 2), ints(0, 0))
    extra = costs.pass_s(2 + 30) - costs.pass_s(2)
    assert costs.draft_s(ints(2, 2), ints(10, 20)) == pytest.approx(plain + extra)
    assert costs.draft_s(ints(2, 2), ints(10, 20), horizon=10) == pytest.approx(plain + extra / 10)


def test_drafts_from_text_cost_a_look_up_each_and_no_pass() -> None:
    costs = CostModel.proportional(step_s=0.01, text_s=0.001)
    assert not costs.has_passes
    assert costs.pass_s(5) == 0
    assert costs.draft_s(ints(16, 0, 3), ints(99, 99, 99)) == pytest.approx(0.002)
    assert costs.draft_s(ints(0, 0), ints(0, 0)) == 0


def test_asking_for_drafts_takes_looking_up_and_deciding() -> None:
    costs = CostModel.proportional(step_s=0.02, text_s=0.001)
    costs.observe_deciding(0.1, drafts=False)
    costs.observe_deciding(0.6, drafts=True)
    assert costs.asking_s(3) == pytest.approx(0.503)
    assert costs.asking_s(np.array([1, 4])) == pytest.approx([0.501, 0.504])


def test_deciding_costs_what_it_takes_longer_with_drafts_and_is_followed_slowly() -> None:
    costs = CostModel.proportional(step_s=0.02)
    costs.observe_deciding(0.6, drafts=True)
    costs.observe_deciding(0.1, drafts=True)
    assert costs.asking_s(1) == pytest.approx(0.6 - 0.05 * 0.5)
    costs.observe_deciding(1.0, drafts=False)
    assert costs.asking_s(1) == 0


def test_a_proportional_model_is_a_line() -> None:
    costs = CostModel.proportional(step_s=0.5, row_s=0.25, kv_token_s=0.125, pass_s=1, pass_row_s=2)
    assert costs.step_s(7, 3) == pytest.approx(0.5 + 7 * 0.25 + 3 * 0.125)
    assert costs.pass_s(3) == pytest.approx(7)


def test_a_machine_twice_as_slow_is_followed() -> None:
    costs = CostModel({Role.STEP: TABLE})
    for _ in range(60):
        costs.observe(Role.STEP, costs.step_s(4), 2 * 0.014)
    assert costs.step_s(4) == pytest.approx(0.028, rel=0.01)


def test_one_step_moves_the_factor_by_a_tenth_of_the_difference() -> None:
    costs = CostModel({Role.STEP: TABLE})
    costs.observe("step", 0.010, 0.015)
    assert costs.factor(Role.STEP) == pytest.approx(1.05)


def test_a_page_fault_hardly_moves_the_factor() -> None:
    costs = CostModel({Role.STEP: TABLE})
    costs.observe(Role.STEP, 0.010, 10.0)
    assert costs.factor(Role.STEP) == pytest.approx(1.2)


def test_nothing_predicted_teaches_nothing() -> None:
    costs = CostModel({Role.STEP: TABLE})
    costs.observe(Role.STEP, 0.0, 1.0)
    assert costs.factor(Role.STEP) == 1.0
    assert sum(costs.stats()[0].errors) == 0


def test_statistics_total_the_times_and_sort_errors_by_the_edges() -> None:
    costs = CostModel({Role.STEP: TABLE, Role.PASS: PASS})
    for predicted_s, measured_s in ((1.0, 1.0), (1.05, 1.0), (0.5, 1.0), (9.0, 1.0)):
        costs.observe(Role.STEP, predicted_s, measured_s)
    step, draft = costs.stats()
    assert (step.role, draft.role) == ("step", "pass")
    assert step.predicted_s == pytest.approx(11.55)
    assert step.measured_s == 4.0
    by_edge = dict(zip((*STEP_ERROR_EDGES, None), step.errors, strict=True))
    assert {edge: count for edge, count in by_edge.items() if count} == {0.01: 1, 0.1: 1, 0.5: 1, None: 1}
    assert sum(draft.errors) == 0


def test_tables_survive_a_file_and_factors_do_not(tmp_path: Path) -> None:
    costs = CostModel({Role.STEP: TABLE, Role.PASS: PASS})
    costs.observe(Role.STEP, 1.0, 2.0)
    costs.save(tmp_path / "deep" / "costs.json")
    again = CostModel.load(tmp_path / "deep" / "costs.json")
    assert again.tables == costs.tables
    assert again.factor(Role.STEP) == 1.0
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["costs.json"]


LANES = tuple(
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
    CostModel({Role.STEP: TABLE}, LANES).save(tmp_path / "costs.json")
    again = CostModel.load(tmp_path / "costs.json")
    assert again.lanes == LANES
    assert again.lanes[1].one(1.0, 0.4, rows=20, context=300) == LANES[1].one(1.0, 0.4, rows=20, context=300)


def test_a_file_from_when_lanes_were_one_number_a_share_is_refused(tmp_path: Path) -> None:
    content = json.loads(CostModel({Role.STEP: TABLE}).to_json())
    content["format"] = 3
    content["lanes"] = [{"share": 0.5, "verify": 1.5, "draft": 1.9, "verify_alone": 1.1, "draft_alone": 1.2}]
    path = tmp_path / "costs.json"
    for number, complaint in ((3, "format is 3"), (content["format"] + 1, "not a cost model")):
        path.write_text(json.dumps({**content, "format": number}))
        with pytest.raises(ConfigError, match=complaint):
            CostModel.load(path)


def test_lanes_with_a_number_missing_are_refused(tmp_path: Path) -> None:
    content = json.loads(CostModel({Role.STEP: TABLE}, LANES).to_json())
    content["lanes"][0]["draft"][1].pop()
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"costs\.json: draft of a co-run has lines of \[3, 2\] numbers"):
        CostModel.load(path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not a cost model"),
        ("[]", "not a cost model"),
        ("{}", "not a cost model"),
        ('{"format": 1, "roles": {}}', "format is 1"),
        (_content("{}"), "no times of role step"),
        (_content('{"walk": {"rows": [1], "seconds": [1], "kv_token_s": 0}}'), "walk"),
        (_content('{"step": {"rows": [2, 1], "seconds": [1, 1], "kv_token_s": 0}}'), "must ascend"),
        (_content('{"step": {"rows": [1, 2], "seconds": [1], "kv_token_s": 0}}'), "2 row counts and 1 times"),
        (_content('{"step": {"rows": [1, 2], "seconds": [2, 1], "kv_token_s": 0}}'), "falls where rows rise"),
        (_content('{"step": {"rows": [1], "seconds": [NaN], "kv_token_s": 0}}'), "not a number of seconds"),
        (_content('{"step": {"rows": [1], "seconds": [1], "kv_token_s": -1}}'), "not a number of seconds"),
        (_content('{"step": {"rows": 3, "seconds": [1], "kv_token_s": 0}}'), "not a cost model"),
    ],
)
def test_a_file_that_is_no_cost_model_is_refused_by_name(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"costs\.json.*{complaint}"):
        CostModel.load(path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json"):
        CostModel.load(tmp_path / "none.json")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="costs"):
        CostModel({Role.STEP: TABLE}).save(tmp_path / "file" / "costs.json")


def test_steps_of_a_range_of_rows_are_those_one_by_one() -> None:
    table = CostTable(rows=(1, 8, 32), seconds=(0.01, 0.02, 0.05), kv_token_s=1e-6)
    costs = CostModel({Role.STEP: table})
    costs.observe(Role.STEP, 0.01, 0.015)
    expected = [costs.step_s(rows, 700) for rows in range(5, 3001)]
    assert costs.steps_s(5, 3000, 700).tolist() == expected
    assert costs.steps_s(7, 7).tolist() == [costs.step_s(7)]
