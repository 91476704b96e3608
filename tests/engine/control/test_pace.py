"""The pace that is fitted to steps, against machines whose pace is known."""

import numpy as np
import pytest

from faser.engine.contract.plan import StepPlan, StepResult, StepRows, StepSpan
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.control.pace import PaceFit, PlannedDrafts, anchors, planned_pace
from faser.engine.control.step_cost import CostModel

STEP_S, ROW_S = 0.01, 0.0005


def costs() -> CostModel:
    return CostModel(StepTimes.proportional(step_s=STEP_S, row_s=ROW_S, pass_s=0.001))


def fit(slots: int = 16) -> PaceFit:
    return PaceFit(costs(), num_slots=slots, most_rows=64)


def step(counts: list[int], tokens: list[int], *, drafts: int = 0) -> tuple[StepPlan, StepResult]:
    """A step of sequences with these rows, each of them with so many drafts, which bring so many tokens."""
    rows = StepRows()
    for slot, count in enumerate(counts):
        rows.add(slot, 10, [1] * count, samples=tokens[slot] > 0, num_drafts=drafts, new_blocks=())
    plan = StepPlan(step=1, released=(), started=(), rows=rows)
    return plan, StepResult(step=1, counts=tokens, token_ids=[1] * sum(tokens), run_s=0.0)


def run(
    fitted: PaceFit, counts: list[int], tokens: list[int], seconds: float, times: int = 20, drafts: int = 0
) -> None:
    """The same step so many times, each of which takes so long."""
    for at in range(times):
        fitted.observe(*step(counts, tokens, drafts=drafts), StepSpan(seconds, 0.0) if at else None)


def test_anchors_rise_to_the_last_one() -> None:
    assert anchors(1) == (1,)
    assert anchors(20) == (1, 2, 3, 4, 6, 8, 12, 16, 20)


def test_before_any_step_the_pace_is_what_the_step_times_promise() -> None:
    found = fit().pace()
    assert found.num_slots == 16
    assert found.tokens == (1.0,) * len(found.sequences)
    assert found.step_s[0] == pytest.approx(costs().step_s(1, 256))
    assert float(found.prompt_s(1, 32.0)) == pytest.approx(32 * ROW_S, rel=0.05)


def test_a_level_takes_what_its_steps_take_and_the_nearest_level_stands_for_those_not_seen() -> None:
    fitted = fit()
    run(fitted, [1] * 4, [1] * 4, 2 * costs().step_s(4, 40))
    found = fitted.pace()
    plain = planned_pace(costs(), num_slots=16, most_rows=64, context=found_context(fitted))
    ratios = np.array(found.step_s) / np.array(plain.step_s)
    assert ratios == pytest.approx(np.full(len(ratios), 2.0), rel=1e-3)
    run(fitted, [1] * 16, [1] * 16, costs().step_s(16, 160))
    later = dict(zip(fitted.pace().sequences, fitted.pace().step_s, strict=True))
    assert later[4] == pytest.approx(2 * costs().step_s(4, round(4 * found_context(fitted))), rel=1e-3)
    assert later[16] == pytest.approx(costs().step_s(16, round(16 * found_context(fitted))), rel=1e-3)


def test_of_large_steps_one_in_several_is_counted_and_the_pace_is_the_same() -> None:
    fitted = fit(slots=64)
    run(fitted, [1] * 64, [1] * 64, 2 * costs().step_s(64, 640), times=30)
    assert fitted._levels[(64).bit_length()].num_steps == 10
    found = dict(zip(fitted.pace().sequences, fitted.pace().step_s, strict=True))
    assert found[64] == pytest.approx(2 * costs().step_s(64, round(64 * found_context(fitted))), rel=1e-3)


def found_context(fitted: PaceFit) -> float:
    return fitted._context


def test_drafts_are_tokens_and_seconds_of_their_steps() -> None:
    """One sequence, two drafts, of which one is accepted on average."""
    fitted = fit()
    for at in range(200):
        accepted = at % 3
        fitted.observe(*step([3], [1 + accepted], drafts=2), StepSpan(0.012, 0.0))
    assert fitted.pace().tokens[0] == pytest.approx(2.0, rel=0.02)
    assert float(fitted.pace().token_s(1.0)) == pytest.approx(0.006, rel=0.05)


def test_prompts_cost_what_they_lengthen_steps_by() -> None:
    fitted = fit()
    run(fitted, [1] * 2, [1] * 2, costs().step_s(2, 20))
    run(fitted, [1, 41], [1, 0], costs().step_s(2, 20) + 40 * 3 * ROW_S, times=300)
    assert float(fitted.pace().prompt_s(1.0, 32.0)) == pytest.approx(3 * 32 * ROW_S, rel=0.1)


def test_a_pause_counts_as_three_steps_at_most_and_idle_time_as_none() -> None:
    fitted = fit()
    run(fitted, [1], [1], costs().step_s(1, 10), times=300)
    before = fitted.pace().step_s[0]
    fitted.observe(*step([1], [1]), StepSpan(100.0, 0.0))
    fitted.observe(*step([1], [1]), None)
    assert fitted.pace().step_s[0] == pytest.approx(before, rel=0.01)


def test_a_fit_that_forgets_promises_what_the_step_times_do() -> None:
    fitted = fit()
    run(fitted, [1] * 4, [1] * 4, 1.0)
    fitted.forget()
    assert fitted.pace() == fit().pace()


def test_planned_drafts_bring_the_tokens_of_a_geometric_series_and_take_passes_and_rows() -> None:
    drafts = PlannedDrafts(gamma=2, acceptance=0.5)
    found = planned_pace(costs(), num_slots=4, most_rows=64, context=0, drafts=drafts, gap_s=0.1)
    assert found.tokens[0] == 1.75
    assert found.step_s[0] == pytest.approx(costs().step_s(3) + 2 * 0.001 + 0.1, rel=1e-3)


def test_a_level_that_was_not_seen_drafts_only_where_rows_are_cheap_enough() -> None:
    """Three drafts that bring two tokens pay at one sequence; at sixteen their rows cost more than they bring."""
    dear = CostModel(StepTimes.proportional(step_s=STEP_S, row_s=0.003))
    fitted = PaceFit(dear, num_slots=16, most_rows=64)
    run(fitted, [1], [1], dear.step_s(1), times=20)
    run(fitted, [4], [3], dear.step_s(4), times=300, drafts=3)
    found = fitted.pace()
    by_count = dict(zip(found.sequences, zip(found.step_s, found.tokens, strict=True), strict=True))
    assert by_count[1][1] == pytest.approx(3.0, rel=0.1)
    assert by_count[2][1] > 2, "eight rows are worth it"
    assert by_count[16][0] == pytest.approx(dear.step_s(16), rel=0.01)
    assert by_count[16][1] == 1.0


def test_drafts_of_fixed_length_are_made_at_every_level_whatever_they_cost() -> None:
    fitted = fit()
    run(fitted, [4], [2], costs().step_s(4), times=20, drafts=3)
    found = fitted.pace()
    assert found.tokens == (2.0,) * len(found.sequences)
    assert found.step_s[-1] == pytest.approx(costs().step_s(16 * 4, 16 * 256), rel=0.05)


def test_the_attention_of_a_prompt_s_rows_is_counted_once() -> None:
    """Oracle: the step times themselves, in which 400 rows that follow 600 attend to 320,000 tokens."""
    table = CostTable(rows=(1, 512), seconds=(STEP_S, STEP_S + 511 * ROW_S), kv_row_token_s=1e-6)
    true = CostModel(StepTimes(tables={Role.STEP: table}))
    fitted = PaceFit(true, num_slots=16, most_rows=512)
    plan, result = prompt_step(start=600, rows=400)
    for _ in range(50):
        fitted.observe(plan, result, StepSpan(true.step_s(plan.num_rows, plan.kv_tokens, plan.kv_row_tokens), 0.0))
    found, planned = fitted.pace(), planned_pace(true, num_slots=16, most_rows=512)
    assert float(found.prompt_s(1.0, 300.0)) == pytest.approx(float(planned.prompt_s(1.0, 300.0)), rel=0.01)


def prompt_step(*, start: int, rows: int) -> tuple[StepPlan, StepResult]:
    """A step of one decoding sequence, and so many rows of a prompt of which `start` tokens are computed."""
    table = StepRows()
    table.add(0, 10, [1], samples=True, num_drafts=0, new_blocks=())
    table.add(1, start, [1] * rows, samples=False, num_drafts=0, new_blocks=())
    plan = StepPlan(step=1, released=(), started=(), rows=table)
    return plan, StepResult(step=1, counts=[1, 0], token_ids=[1], run_s=0.0)
