"""The gap between steps: what the device does is none of it, and neither is waiting for requests."""

import pytest

from faser.engine.contract.drafts import NO_DRAFTS, Drafts
from faser.engine.contract.plan import StepResult
from faser.engine.control.clock import SimulatedClock
from faser.engine.gap_timer import GapTimer


def step(run_s: float, *, prepared_s: float = 0.0, began_s: float = 0.0) -> StepResult:
    return StepResult(step=1, counts=[], token_ids=[], run_s=run_s, prepared_s=prepared_s, began_s=began_s)


def drafting(run_s: float, *, began_s: float = 0.0) -> Drafts:
    return Drafts(step=1, table=NO_DRAFTS, run_s=run_s, began_s=began_s)


def test_what_a_step_leaves_to_do_is_part_of_its_own_gap() -> None:
    """Steps with drafts take 50 µs before and 130 after they run, plain ones 5 and 10."""
    clock = SimulatedClock()
    timer = GapTimer(clock.now)
    found: dict[str, list[float]] = {"D": [], "P": []}
    kinds = "DDDPDPPD"
    for last, kind in zip(" " + kinds, kinds, strict=False):
        timer.begin_step()
        if timer.last is not None:
            found[last].append(timer.last.gap_s)
        before_s, after_s = (50e-6, 130e-6) if kind == "D" else (5e-6, 10e-6)
        clock.advance(before_s)
        if kind == "D":
            timer.drafted(drafting(1e-3))
            clock.advance(1e-3)
        timer.ran(step(3e-3))
        clock.advance(3e-3 + after_s)
    assert found["D"] == pytest.approx([180e-6] * 4)
    assert found["P"] == pytest.approx([15e-6] * 3)


def test_preparing_a_step_is_no_work_of_the_device() -> None:
    clock = SimulatedClock()
    timer = GapTimer(clock.now)
    timer.begin_step()
    assert timer.last is None
    timer.drafted(drafting(1.0))
    timer.drafted(drafting(2.0))
    timer.ran(step(4.0, prepared_s=0.5))
    clock.advance(9.0)
    timer.begin_step()
    assert timer.last == pytest.approx((9.0, 9 - 3 - 4 + 0.5))


def test_a_step_and_its_overlapped_drafts_work_from_the_first_begin_to_the_last_end() -> None:
    clock = SimulatedClock()
    timer = GapTimer(clock.now)
    timer.begin_step()
    timer.ran(step(4.0, began_s=3.0), drafting(5.0, began_s=4.0))
    clock.advance(10.0)
    timer.begin_step()
    assert timer.last == pytest.approx((10.0, 10 - 6))


def test_a_step_before_waiting_for_requests_has_no_gap() -> None:
    clock = SimulatedClock()
    timer = GapTimer(clock.now)
    timer.begin_step()
    timer.ran(step(1.0))
    timer.restart()
    clock.advance(1000.0)
    timer.begin_step()
    assert timer.last is None
    timer.ran(step(1.0))
    clock.advance(1.5)
    timer.begin_step()
    assert timer.last == pytest.approx((1.5, 0.5))
