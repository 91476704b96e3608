"""The cost model: tables, factors, files."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.control.step_cost import CostModel
from faser.types import STEP_ERROR_EDGES

TABLE = CostTable(rows=(1, 2, 4, 8), seconds=(0.010, 0.010, 0.014, 0.030), kv_token_s=1e-6)
PASS = CostTable(rows=(1, 4), seconds=(0.001, 0.002))


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def test_measured_counts_are_met_between_them_time_is_linear_and_above_it_goes_on_rising() -> None:
    costs = CostModel(StepTimes(tables={Role.STEP: TABLE}))
    assert costs.step_s(2) == pytest.approx(0.010)
    assert costs.step_s(3) == pytest.approx(0.012)
    assert costs.step_s(12) == pytest.approx(0.030 + 4 * (0.030 - 0.014) / 4)
    assert costs.step_s(5000) == pytest.approx(0.030 + 4992 * 0.004)


def test_tokens_in_the_cache_cost_what_the_slope_says() -> None:
    costs = CostModel(StepTimes(tables={Role.STEP: TABLE}))
    assert costs.step_s(4, 3000) == pytest.approx(0.014 + 0.003)


def test_an_array_of_row_counts_gives_what_each_gives_alone() -> None:
    costs = CostModel(StepTimes(tables={Role.STEP: TABLE}))
    rows = ints(1, 3, 7, 4000, 1)
    assert costs.step_s(rows, 10).tolist() == [costs.step_s(int(each), 10) for each in rows]


@given(st.dictionaries(st.integers(1, 300), st.floats(1e-6, 10), min_size=1, max_size=12))
def test_more_rows_are_never_predicted_to_be_faster(medians: dict[int, float]) -> None:
    costs = CostModel(StepTimes(tables={Role.STEP: CostTable.measured(medians)}))
    assert (np.diff(costs.step_s(np.arange(1, 700))) >= -1e-12).all()


def test_drafting_is_one_pass_per_token_of_the_longest_draft_with_those_that_go_on() -> None:
    costs = CostModel(StepTimes(tables={Role.STEP: TABLE, Role.PASS: PASS}))
    expected = costs.pass_s(3) + costs.pass_s(2) + costs.pass_s(2) + costs.pass_s(1)
    assert costs.draft_s(ints(1, 4, 0, 3), ints(0, 0, 9, 0)) == pytest.approx(expected)


def test_catching_up_is_rows_of_the_first_pass_spread_over_the_horizon() -> None:
    costs = CostModel(StepTimes(tables={Role.STEP: TABLE, Role.PASS: PASS}))
    plain = costs.draft_s(ints(2, 2), ints(0, 0))
    extra = costs.pass_s(2 + 30) - costs.pass_s(2)
    assert costs.draft_s(ints(2, 2), ints(10, 20)) == pytest.approx(plain + extra)
    assert costs.draft_s(ints(2, 2), ints(10, 20), horizon=10) == pytest.approx(plain + extra / 10)


def test_drafts_from_text_cost_a_look_up_each_and_no_pass() -> None:
    costs = CostModel(StepTimes.proportional(step_s=0.01, text_s=0.001))
    assert not costs.has_passes
    assert costs.pass_s(5) == 0
    assert costs.draft_s(ints(16, 0, 3), ints(99, 99, 99)) == pytest.approx(0.002)
    assert costs.draft_s(ints(0, 0), ints(0, 0)) == 0


def test_a_proportional_model_is_a_line() -> None:
    costs = CostModel(StepTimes.proportional(step_s=0.5, row_s=0.25, kv_token_s=0.125, pass_s=1, pass_row_s=2))
    assert costs.step_s(7, 3) == pytest.approx(0.5 + 7 * 0.25 + 3 * 0.125)
    assert costs.pass_s(3) == pytest.approx(7)


def test_a_machine_twice_as_slow_is_followed() -> None:
    costs = CostModel(StepTimes(tables={Role.STEP: TABLE}))
    for _ in range(60):
        costs.observe(Role.STEP, costs.step_s(4), 2 * 0.014)
    assert costs.step_s(4) == pytest.approx(0.028, rel=0.01)


def test_one_step_moves_the_factor_by_a_tenth_of_the_difference() -> None:
    costs = CostModel(StepTimes(tables={Role.STEP: TABLE}))
    costs.observe("step", 0.010, 0.015)
    assert costs.factor(Role.STEP) == pytest.approx(1.05)


def test_a_page_fault_hardly_moves_the_factor() -> None:
    costs = CostModel(StepTimes(tables={Role.STEP: TABLE}))
    costs.observe(Role.STEP, 0.010, 10.0)
    assert costs.factor(Role.STEP) == pytest.approx(1.2)


def test_nothing_predicted_teaches_nothing() -> None:
    costs = CostModel(StepTimes(tables={Role.STEP: TABLE}))
    costs.observe(Role.STEP, 0.0, 1.0)
    assert costs.factor(Role.STEP) == 1.0
    assert sum(costs.stats()[0].errors) == 0


def test_statistics_total_the_times_and_sort_errors_by_the_edges() -> None:
    costs = CostModel(StepTimes(tables={Role.STEP: TABLE, Role.PASS: PASS}))
    for predicted_s, measured_s in ((1.0, 1.0), (1.05, 1.0), (0.5, 1.0), (9.0, 1.0)):
        costs.observe(Role.STEP, predicted_s, measured_s)
    step, draft = costs.stats()
    assert (step.role, draft.role) == ("step", "pass")
    assert step.predicted_s == pytest.approx(11.55)
    assert step.measured_s == 4.0
    by_edge = dict(zip((*STEP_ERROR_EDGES, None), step.errors, strict=True))
    assert {edge: count for edge, count in by_edge.items() if count} == {0.01: 1, 0.1: 1, 0.5: 1, None: 1}
    assert sum(draft.errors) == 0


def test_steps_of_a_range_of_rows_are_those_one_by_one() -> None:
    table = CostTable(rows=(1, 8, 32), seconds=(0.01, 0.02, 0.05), kv_token_s=1e-6, kv_row_token_s=1e-7)
    costs = CostModel(StepTimes(tables={Role.STEP: table}))
    costs.observe(Role.STEP, 0.01, 0.015)
    expected = [costs.step_s(rows, 700) for rows in range(5, 3001)]
    assert costs.steps_s(5, 3000, 700) == pytest.approx(expected, rel=1e-12)
    assert costs.steps_s(7, 7) == pytest.approx([costs.step_s(7)], rel=1e-12)
    expected = [costs.step_s(rows, 700, 350 * (rows - 5)) for rows in range(5, 3001)]
    assert costs.steps_s(5, 3000, 700, 350.0) == pytest.approx(expected, rel=1e-12)
    assert costs.steps_s(7, 7, 700, 350.0).tolist() == [costs.step_s(7, 700)]


def test_further_rows_of_a_sequence_cost_more_the_longer_its_context() -> None:
    table = CostTable(rows=(1, 32), seconds=(0.01, 0.02), kv_token_s=2e-6, kv_row_token_s=3e-7)
    costs = CostModel(StepTimes(tables={Role.STEP: table}))
    costs.observe(Role.STEP, 1.0, 2.0)
    added_s = costs.step_s(9, 4000, 8 * 4000) - costs.step_s(1, 4000)
    assert added_s == pytest.approx(1.1 * (8 * 0.01 / 31 + 3e-7 * 8 * 4000))
