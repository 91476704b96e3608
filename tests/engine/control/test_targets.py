"""Targets in a real scheduler: what is due goes first, others leave room for it, and none of them starves."""

from dataclasses import replace

import pytest

from faser.engine.contract.step_times import StepTimes
from faser.engine.contract.target_room import PATIENCE_S
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.pace import PaceFit
from faser.engine.control.step_cost import CostModel
from faser.engine.control.targets import NO_TARGETS, TargetKeeper
from faser.types.request import Request, Slo, SpeculationParams
from tests.engine.driving import Driver, request, rows_by_slot

STEP_S, ROW_S = 0.010, 0.001
SLOTS, ROWS = 8, 32


def fit() -> PaceFit:
    """A step takes 10 ms, and 1 ms more for every row."""
    return PaceFit(CostModel(StepTimes.proportional(step_s=STEP_S, row_s=ROW_S)), num_slots=SLOTS, most_rows=ROWS)


def due(name: str, *, at_s: float = 0.0, due_s: float | None = None, prompt: int = 3, **sampling: int) -> Request:
    return replace(request(name, [9] * prompt, at_s=at_s, **sampling), due_s=due_s, cache_salt=name)


def paced(name: str, tpot_ms: float, *, at_s: float = 0.0, max_tokens: int = 4) -> Request:
    """A request with a target per token."""
    asked = SpeculationParams(slo=Slo(tpot_ms=tpot_ms))
    return replace(due(name, at_s=at_s, max_tokens=max_tokens), speculation=asked)


def order(driver: Driver) -> list[str]:
    """The requests in the order in which they end."""
    found = []
    while driver.scheduler.has_work():
        plan = driver.plan()
        assert plan is not None
        found += [delta.request_id for delta in driver.commit(plan) if delta.finish_reason is not None]
    return found


def test_what_is_due_first_goes_first_and_patience_stands_in_for_no_target() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add(
        due("patient", at_s=0.0),
        due("later", at_s=1.0, due_s=5.0),
        due("sooner", at_s=2.0, due_s=3.0),
        due("long since", at_s=4.5 - PATIENCE_S),
    )
    assert order(driver) == ["sooner", "long since", "later", "patient"]


def test_without_targets_the_order_is_that_of_arrival() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add(*(due(f"{at}", at_s=at) for at in (3.0, 1.0, 2.0)))
    assert order(driver) == ["1.0", "2.0", "3.0"]


def test_requests_that_are_due_delay_one_without_a_target_by_its_patience_at_most() -> None:
    """One request that is due a second later comes for every second, which is more than one slot serves."""
    driver = Driver(max_num_seqs=1)
    driver.add(due("patient", at_s=0.0, max_tokens=2))
    ended: list[str] = []
    for second in range(200):
        driver.add(due(f"due-{second}", at_s=float(second), due_s=second + 1.0, max_tokens=2))
        ended += [delta.request_id for delta in driver.commit(driver.plan()) if delta.finish_reason is not None]  # type: ignore[arg-type]
        if "patient" in ended:
            break
    assert "patient" in ended, "it starves"
    # Those that are due before its arrival and patience, and no other one, went first.
    assert len(ended) - 1 <= PATIENCE_S


def test_a_newcomer_that_is_due_before_a_begun_prompt_gets_its_rows_before_it() -> None:
    driver = Driver(max_num_batched_tokens=8)
    driver.add(due("long", prompt=40))
    driver.step()
    driver.add(due("due", at_s=1.0, due_s=2.0, prompt=6))
    assert sorted(rows_by_slot(driver.step()).values()) == [2, 6]


def test_a_newcomer_without_a_target_waits_for_the_rest_of_a_begun_prompt() -> None:
    driver = Driver(max_num_batched_tokens=8)
    driver.add(due("long", prompt=40))
    driver.step()
    driver.add(due("patient", at_s=1.0, prompt=6))
    assert list(rows_by_slot(driver.step()).values()) == [8]


def test_patient_sequences_leave_room_for_a_target_that_was_asked_for() -> None:
    """Oracle: a step of n sequences takes 10 + n ms. 16 ms, less a tenth, are room for four."""
    driver = Driver(max_num_seqs=SLOTS, pace=fit(), max_model_len=64)
    driver.add(paced("target", 16, max_tokens=40))
    driver.step()
    driver.add(*(due(f"patient-{at}", at_s=0.1 * at, max_tokens=30) for at in range(6)))
    for _ in range(12):
        driver.step()
    assert driver.scheduler.stats().num_running == 4


def test_a_sequence_whose_target_cannot_be_met_leaves_room_as_one_without() -> None:
    driver = Driver(max_num_seqs=SLOTS, pace=fit(), max_model_len=64)
    driver.add(paced("target", 16, max_tokens=40))
    driver.step()
    driver.add(
        *(replace(paced(f"late-{at}", 16, at_s=0.1 * at, max_tokens=30), is_patient=True) for at in range(6))
    )
    for _ in range(12):
        driver.step()
    assert driver.scheduler.stats().num_running == 4


def test_a_slot_is_left_for_a_newcomer_with_a_target_that_all_slots_keep() -> None:
    driver = Driver(max_num_seqs=SLOTS, pace=fit(), max_model_len=64)
    driver.add(paced("target", 40, max_tokens=40))
    driver.step()
    driver.add(*(due(f"patient-{at}", at_s=0.1 * at, max_tokens=30) for at in range(9)))
    for _ in range(12):
        driver.step()
    assert driver.scheduler.stats().num_running == SLOTS - 1


def test_without_targets_every_slot_is_used() -> None:
    driver = Driver(max_num_seqs=SLOTS, pace=fit())
    driver.add(*(due(f"patient-{at}", at_s=0.1 * at, max_tokens=30) for at in range(9)))
    for _ in range(5):
        driver.step()
    assert driver.scheduler.stats().num_running == SLOTS


def test_sequences_with_targets_are_not_held_up_by_patient_ones_in_front_of_them() -> None:
    driver = Driver(max_num_seqs=SLOTS, pace=fit())
    driver.add(paced("first", 11, max_tokens=40))
    driver.step()
    driver.add(*(due(f"patient-{at}", at_s=0.1 * at, max_tokens=30) for at in range(4)))
    driver.add(paced("second", 11, at_s=50.0, max_tokens=40))
    driver.step()
    driver.step()
    assert driver.scheduler.stats().num_running == 3  # both, and the one patient sequence that may always run


@pytest.mark.parametrize("tpot_ms", [1, 11, 14])
def test_no_patient_sequence_starves_however_tight_the_target_and_however_many_have_it(tpot_ms: float) -> None:
    """Bound: each of q patient sequences has run once q answers, one after the other, are over."""
    driver = Driver(max_num_seqs=SLOTS, pace=fit(), num_blocks=200)
    patient = [due(f"patient-{at}", at_s=0.01 * at, max_tokens=6) for at in range(5)]
    driver.add(paced("first", tpot_ms, max_tokens=6))
    driver.step()
    driver.add(*patient)
    ended: list[str] = []
    steps = 0
    while len([name for name in ended if name.startswith("patient")]) < len(patient):
        steps += 1
        assert steps <= 5 * (6 + 3), "a patient sequence starves"
        if driver.scheduler.stats().num_waiting < 12:
            driver.add(paced(f"paced-{steps}", tpot_ms, at_s=float(steps), max_tokens=6))
        plan = driver.plan()
        assert plan is not None
        ended += [delta.request_id for delta in driver.commit(plan) if delta.finish_reason is not None]


def test_a_patient_prompt_is_cut_to_the_rows_that_the_target_leaves() -> None:
    driver = Driver(max_num_seqs=SLOTS, max_num_batched_tokens=ROWS, pace=fit(), max_model_len=64)
    driver.add(paced("target", 20, max_tokens=40))
    driver.step()
    driver.add(due("patient", prompt=40))
    rows = sorted(rows_by_slot(driver.step()).values())
    # 18 ms hold one row for 10 ms, and 8 more.
    assert rows[0] == 1
    assert 4 <= rows[1] <= 8


@pytest.mark.parametrize("share, keeps_room", [(0.65, True), (0.95, False)])
def test_prompts_get_less_only_where_tokens_take_nearly_as_long_as_their_target(
    share: float, *, keeps_room: bool
) -> None:
    driver = Driver(max_num_seqs=SLOTS, max_num_batched_tokens=ROWS, pace=fit(), max_model_len=256)
    driver.add(paced("target", 20, max_tokens=240))
    for _ in range(200):
        driver.step()
        driver.clock.advance(share * 0.020)
    driver.add(due("patient", at_s=driver.clock.now(), prompt=40))
    assert (sorted(rows_by_slot(driver.step()).values())[1] >= 4) == keeps_room


@pytest.mark.parametrize("gave_up, places", [(True, 4), (False, 2)])
def test_only_those_that_gave_a_target_up_fill_the_room_while_tokens_take_too_long(
    *, gave_up: bool, places: int
) -> None:
    """Oracle: a step of n sequences takes 10 + n ms. 16 ms, less a tenth, are room for four; the least for two."""
    driver = Driver(max_num_seqs=SLOTS, max_num_batched_tokens=ROWS, pace=fit(), max_model_len=256)
    driver.add(paced("target", 16, max_tokens=240))
    for _ in range(200):
        driver.step()
        driver.clock.advance(0.020)
    late = [paced(f"late-{at}", 16, at_s=driver.clock.now(), max_tokens=30) for at in range(6)]
    without = [due(f"without-{at}", at_s=driver.clock.now(), max_tokens=30) for at in range(6)]
    driver.add(*(replace(each, is_patient=True) for each in late) if gave_up else without)
    for _ in range(12):
        driver.step()
    assert driver.scheduler.stats().num_running == places


@pytest.mark.parametrize("first_gave_up", [True, False])
def test_those_that_gave_a_target_up_and_those_without_do_not_hold_each_other_up(*, first_gave_up: bool) -> None:
    driver = Driver(max_num_seqs=SLOTS, max_num_batched_tokens=ROWS, pace=fit(), max_model_len=256)
    driver.add(paced("target", 16, max_tokens=240))
    for _ in range(200):
        driver.step()
        driver.clock.advance(0.020)

    def added(name: str, *, gave_up: bool, max_tokens: int) -> None:
        asked = paced(name, 16, at_s=driver.clock.now(), max_tokens=max_tokens)
        request = due(name, at_s=driver.clock.now(), max_tokens=max_tokens)
        driver.add(replace(asked, is_patient=True) if gave_up else request)

    for at in range(3):
        added(f"first-{at}", gave_up=first_gave_up, max_tokens=6)
    driver.step()
    added("other", gave_up=not first_gave_up, max_tokens=3)
    ended: list[str] = []
    for at in range(3, 15):
        added(f"first-{at}", gave_up=first_gave_up, max_tokens=6)
        plan = driver.plan()
        assert plan is not None
        ended += [delta.request_id for delta in driver.commit(plan) if delta.finish_reason is not None]
    assert "other" in ended


def test_a_prompt_that_is_due_is_not_cut() -> None:
    driver = Driver(max_num_seqs=SLOTS, max_num_batched_tokens=ROWS, pace=fit(), max_model_len=64)
    driver.add(paced("target", 20, max_tokens=40))
    driver.step()
    driver.add(due("due", prompt=40, due_s=1.0))
    assert sorted(rows_by_slot(driver.step()).values()) == [1, ROWS - 1]


def test_a_target_is_forgotten_a_minute_after_the_last_request_that_had_it() -> None:
    clock = SimulatedClock(5.0)
    keeper = TargetKeeper(fit(), clock, most_rows=ROWS)
    assert keeper.limits([], 0) is NO_TARGETS
    keeper.see(14)
    assert keeper.limits([], 0) is not NO_TARGETS
    clock.advance(59.0)
    assert keeper.limits([], 0) is not NO_TARGETS
    clock.advance(2.0)
    assert keeper.limits([], 0) is NO_TARGETS


def test_a_request_that_waits_goes_where_its_new_targets_put_it() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add(
        due("running", due_s=0.5), due("first", at_s=1.0, due_s=5.0), due("late", at_s=2.0), due("last", at_s=3.0)
    )
    driver.step()
    driver.scheduler.reclassify(due("late", at_s=2.0, due_s=4.0))
    driver.scheduler.check_invariants()
    assert order(driver) == ["running", "late", "first", "last"]


def test_a_request_that_runs_or_is_unknown_stays_as_it_is() -> None:
    driver = Driver(max_num_seqs=1)
    driver.add(due("running", max_tokens=4), due("next", at_s=1.0))
    driver.step()
    for name in ("running", "ended"):
        driver.scheduler.reclassify(due(name, due_s=1.0, max_tokens=4))
    driver.scheduler.check_invariants()
    assert order(driver) == ["running", "next"]


def test_samples_that_wait_for_the_first_ones_prompt_get_the_new_targets_with_it() -> None:
    driver = Driver(max_num_seqs=SLOTS, pace=fit())
    driver.add(paced("target", 11, max_tokens=40), *(due(f"patient-{at}", max_tokens=40) for at in range(3)))
    driver.add(due("samples", at_s=0.1, n=2, max_tokens=40))
    driver.step()
    asked = SpeculationParams(slo=Slo(tpot_ms=11))
    driver.scheduler.reclassify(replace(due("samples", at_s=0.1, n=2, max_tokens=40), speculation=asked))
    for _ in range(4):
        driver.step()
        driver.scheduler.check_invariants()
    assert driver.scheduler.stats().num_running == 4  # three with a target, and one patient one
