"""The gap between steps: what the device does is none of it, and neither is waiting for requests."""

import pytest

from faser.engine.contract.plan import Drafts, StepResult
from faser.engine.control.timing.clock import SimulatedClock
from faser.engine.gap_timer import GapTimer


def step(run_s: float, *, prepared_s: float = 0.0, began_s: float = 0.0) -> StepResult:
    return StepResult(step=1, sequences=(), run_s=run_s, prepared_s=prepared_s, began_s=began_s)


def drafting(run_s: float, *, began_s: float = 0.0) -> Drafts:
    return Drafts(step=1, drafts=(), run_s=run_s, began_s=began_s)


def test_the_gap_is_what_is_left_of_the_time_between_two_ends() -> None:
    clock = SimulatedClock()
    timer = GapTimer(clock.now)
    assert timer.end_step(step(5.0)) is None
    clock.advance(9.0)
    timer.add_drafting(drafting(1.0))
    timer.add_drafting(drafting(2.0))
    assert timer.end_step(step(4.0, prepared_s=0.5)) == pytest.approx(9 - 3 - 4 + 0.5)
    clock.advance(4.25)
    assert timer.end_step(step(4.0)) == pytest.approx(0.25)


def test_a_step_and_its_overlapped_drafts_work_from_the_first_begin_to_the_last_end() -> None:
    clock = SimulatedClock()
    timer = GapTimer(clock.now)
    timer.end_step(step(1.0))
    clock.advance(10.0)
    assert timer.end_step(step(4.0, began_s=3.0), drafting(5.0, began_s=4.0)) == pytest.approx(10 - 6)


def test_a_step_after_waiting_for_requests_has_no_gap() -> None:
    clock = SimulatedClock()
    timer = GapTimer(clock.now)
    timer.end_step(step(1.0))
    timer.add_drafting(drafting(0.5))
    timer.restart()
    clock.advance(1000.0)
    assert timer.end_step(step(1.0)) is None
    clock.advance(1.5)
    assert timer.end_step(step(1.0)) == pytest.approx(0.5)
