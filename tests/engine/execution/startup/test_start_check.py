"""Whether kept step times hold. The times now are those of a machine that is some times slower than its table."""

import logging
from collections.abc import Mapping, Sequence

import pytest

from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.execution.startup.step_profiler import BatchShape
from faser.engine.execution.startup.step_times import SecondsNow, start_check
from faser.machine import BusyMeter, CoreUse

STEP = CostTable(rows=(1, 4, 8, 32), seconds=(0.010, 0.012, 0.015, 0.040), kv_token_s=1e-6, kv_row_token_s=1e-7)
PASS = CostTable(rows=(1, 8, 32), seconds=(0.002, 0.003, 0.006))
TIMES = StepTimes(tables={Role.STEP: STEP, Role.PASS: PASS})


def slower(table: CostTable, times: dict[int, float]) -> SecondsNow:
    """times: how many times slower than the table, by row count; 1 for those left out."""

    def seconds_now(row_counts: Sequence[int], _budget_s: float) -> dict[BatchShape, float]:
        shapes = [BatchShape(rows=rows, rows_each=4, context=64) for rows in row_counts]
        return {
            shape: times.get(shape.rows, 1.0) * table.seconds_at(shape.rows, shape.kv_tokens, shape.kv_row_tokens)
            for shape in shapes
        }

    return seconds_now


def meter_of(share: float) -> BusyMeter:
    start = CoreUse(ran_s=0.0, waited_s=0.0, used_s=0.0, total_s=0.0)
    end = CoreUse(ran_s=1 - share, waited_s=share, used_s=2.0, total_s=2.0)
    return BusyMeter(iter([start, end] * 2).__next__)


@pytest.mark.parametrize("factor", [1 / 1.25, 1.0, 1.25])
def test_times_within_the_tolerance_hold(factor: float) -> None:
    everywhere = dict.fromkeys((1, 8, 32), factor)
    timers = {Role.STEP: slower(STEP, everywhere), Role.PASS: slower(PASS, everywhere)}
    assert start_check(TIMES, timers, meter=meter_of(0.0)) is None


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_a_step_that_is_faster_now_refutes_the_times_even_on_a_busy_machine(rows: int, share: float) -> None:
    timers = {Role.STEP: slower(STEP, {1: 2.0, 8: 2.0, rows: 0.5})}
    complaint = start_check(TIMES, timers, meter=meter_of(share))
    assert complaint is not None
    assert f"a step of {rows} row" in complaint


def test_the_complaint_has_both_times_of_the_step_that_differs_most() -> None:
    timers = {Role.STEP: slower(STEP, {1: 1.4, 8: 2.0})}
    then_ms = 1e3 * STEP.seconds_at(8, 2 * 60, 2 * (61 + 62 + 63))
    complaint = start_check(TIMES, timers, meter=meter_of(0.0))
    assert complaint == f"a step of 8 rows takes {2 * then_ms:.2f} ms now, {then_ms:.2f} ms in the file"


def test_a_slower_step_beside_other_processes_says_nothing_and_the_log_has_the_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    timers = {Role.STEP: slower(STEP, {8: 2.0})}
    with caplog.at_level(logging.INFO, logger="faser.engine"):
        assert start_check(TIMES, timers, meter=meter_of(0.4)) is None
    (line,) = caplog.messages
    assert "step times are kept: a step of 8 rows" in line
    assert "40 % of the cores" in line


def test_passes_are_checked_too() -> None:
    timers = {Role.STEP: slower(STEP, {}), Role.PASS: slower(PASS, {1: 0.4})}
    complaint = start_check(TIMES, timers, meter=meter_of(0.0))
    assert complaint is not None
    assert complaint.startswith("a pass of 1 row takes 0.8")


@pytest.mark.parametrize(
    ("rows", "seconds", "checked"),
    [
        ((1, 8, 32, 64), (0.01, 0.012, 0.04, 0.07), [1, 8, 32]),
        ((1, 8, 32), (0.02, 0.04, 0.2), [1, 8]),
        ((1, 8, 32), (0.9, 1.0, 2.0), [1]),
        ((1,), (0.01,), [1]),
        ((2, 3), (0.01, 0.01), [2]),
    ],
)
def test_only_what_takes_a_fraction_of_a_second_is_timed(
    rows: tuple[int, ...], seconds: tuple[float, ...], checked: list[int]
) -> None:
    asked: list[list[int]] = []
    table = CostTable(rows=rows, seconds=seconds)

    def seconds_now(row_counts: Sequence[int], budget_s: float) -> Mapping[BatchShape, float]:
        asked.append([*row_counts])
        assert budget_s < 0.5
        return slower(table, {})(row_counts, budget_s)

    assert start_check(StepTimes(tables={Role.STEP: table}), {Role.STEP: seconds_now}) is None
    assert asked == [checked]


def test_a_file_without_the_times_of_a_role_is_refuted() -> None:
    kept = StepTimes(tables={Role.STEP: STEP})
    timers = {Role.STEP: slower(STEP, {}), Role.PASS: slower(PASS, {})}
    assert start_check(kept, timers, meter=meter_of(0.0)) == "it has no times of role pass"


def test_times_of_zero_are_refuted() -> None:
    kept = StepTimes(tables={Role.STEP: CostTable(rows=(1, 8), seconds=(0.0, 0.0))})
    complaint = start_check(kept, {Role.STEP: slower(STEP, {})}, meter=meter_of(0.0))
    assert complaint is not None
    assert "0.00 ms in the file" in complaint
