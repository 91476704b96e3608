"""Sequences of many adapters share a few slots: none computes with another's, none waits for ever.

Oracles: each sample alone, whose tokens depend on its adapter; the executor's memory, in which keys and values
depend on it too; the invariants after every operation.

Planted bugs that these tests have caught, beside those that stand below: no slot is ever reserved; a reserved one
admits its old adapter, or another one, or stays reserved after an abort; adapters of waiting requests are not in
use; a scored prompt without a slot stops launches ahead, or one with a slot never starts.
"""

import random
from dataclasses import replace
from typing import Any

import pytest

from faser.engine.contract.plan import AdapterPlacement, StepPlan
from faser.engine.control.adapters import MOST_OVERTAKING, AdapterSlots
from faser.engine.control.kv_cache import KvManager, SequenceBlocks
from faser.engine.control.step_builder import StepsInFlight
from faser.engine.engine import Engine
from faser.errors import RequestError
from faser.types.adapter import Adapter
from faser.types.request import Request
from tests.engine.driving import BLOCK_SIZE, Driver, adapter, expected_prompt_logprobs, request
from tests.fakes import RandomPolicy


def with_adapter(name: str, adapter_name: str | None, prompt: list[int], **sampling: Any) -> Request:
    chosen = None if adapter_name is None else adapter(adapter_name)
    return replace(request(name, prompt, **sampling), adapter=chosen)


def started(plan: StepPlan) -> list[tuple[int, ...]]:
    return [start.token_ids for start in plan.started]


def test_sequences_with_one_adapter_share_a_slot_and_the_base_model_needs_none() -> None:
    driver = Driver(max_loras=2)
    asked = [with_adapter(name, which, [1, 2]) for name, which in zip("abcd", ["x", "x", "y", None], strict=True)]
    driver.add(*asked)
    plan = driver.step()
    assert plan.adapters == (
        AdapterPlacement(0, adapter("x").digest),
        AdapterPlacement(1, adapter("y").digest),
    )
    assert [start.adapter for start in plan.started] == [0, 0, 1, -1]
    assert driver.scheduler.stats().running_adapters == ("x", "y")
    driver.run()
    driver.check(*asked)


def test_a_sequence_without_a_slot_is_passed_over_and_keeps_its_place() -> None:
    driver = Driver(max_loras=1)
    driver.add(with_adapter("a", "x", [1], max_tokens=4))
    driver.step()
    driver.add(with_adapter("b", "y", [2]), with_adapter("c", None, [3]), with_adapter("d", "x", [4]))
    driver.add(with_adapter("e", "y", [5]), with_adapter("f", "z", [6]))
    assert started(driver.step()) == [(3,), (4,)]
    stats = driver.scheduler.stats()
    assert (stats.running_adapters, stats.waiting_adapters, stats.num_waiting) == (("x",), ("y", "z"), 3)
    later = [started(plan) for plan in driver.run() if plan.started]
    assert later == [[(2,), (5,)], [(6,)]]


def test_an_adapter_stays_in_its_slot_until_another_needs_the_room() -> None:
    driver = Driver(max_loras=2)
    placed = []
    for number, name in enumerate(["x", "y", "x", "z", "x", "y"]):
        driver.add(with_adapter(str(number), name, [1], max_tokens=1))
        placed += [[each.slot for each in plan.adapters] for plan in driver.run()]
    assert placed == [[0], [1], [], [1], [], [1]], "y was used least recently when z came"


def test_a_request_with_an_adapter_needs_an_engine_with_adapters() -> None:
    with pytest.raises(RequestError, match="start it with --enable-lora"):
        Driver().add(with_adapter("a", "x", [1]))


def overtaking(driver: Driver, count: int) -> int:
    """Sequences with adapter x always run and always wait; how many start before the one with y that waits."""
    number = 0

    def more() -> None:
        nonlocal number
        driver.add(with_adapter(f"x{number}", "x", [9], max_tokens=3 + number % 3))
        number += 1

    for _ in range(3):
        more()
    driver.step()
    driver.add(with_adapter("y", "y", [5], max_tokens=2))
    before = number
    for _ in range(count):
        more()
        plan = driver.step()
        if (5,) in started(plan):
            return number - before
    raise AssertionError(f"{count} steps, and it still waits")


@pytest.mark.parametrize("max_loras", [1, 2])
def test_a_sequence_waits_for_a_bounded_number_of_others(max_loras: int) -> None:
    driver = Driver(max_loras=max_loras, max_num_seqs=4, max_model_len=16)
    if max_loras == 2:  # the other slot is taken for long
        driver.add(with_adapter("z", "z", [8], max_tokens=14))
    assert overtaking(driver, 200) <= MOST_OVERTAKING + 20
    driver.run()


def test_a_reserved_slot_is_free_again_when_its_sequence_is_aborted() -> None:
    driver = Driver(max_loras=1, max_num_seqs=4)
    driver.add(with_adapter("x", "x", [1], max_tokens=30), with_adapter("y", "y", [2]))
    for number in range(MOST_OVERTAKING + 1):
        driver.add(with_adapter(f"x{number}", "x", [3], max_tokens=1))
        plan = driver.step()
    assert not plan.started, "the slot is to be y's"
    driver.abort("y")
    driver.add(with_adapter("late", "x", [4]))
    assert started(driver.step()) == [(3,), (4,)]
    driver.run()


def test_a_reserved_slot_goes_to_its_sequence_before_others_with_a_better_priority() -> None:
    driver = Driver(max_loras=1, max_num_seqs=4, policy="priority")
    driver.add(with_adapter("x", "x", [1], max_tokens=30), replace(with_adapter("y", "y", [2]), priority=1))
    for number in range(MOST_OVERTAKING + 1):
        driver.add(with_adapter(f"x{number}", "x", [3], max_tokens=1))
        driver.step()
    driver.add(with_adapter("z", "z", [4]))
    assert [started(plan) for plan in driver.run() if plan.started] == [[(2,)], [(4,)]]


def test_a_slot_with_rows_in_flight_gets_no_other_adapter() -> None:
    driver = Driver(max_loras=1)
    engine = Engine(driver.scheduler, driver.executor, schedules_async=True)
    base, asked = with_adapter("base", None, [3], max_tokens=12), with_adapter("y", "y", [2])
    driver.add(with_adapter("x", "x", [1], max_tokens=20), base)
    step(engine, driver)
    driver.abort("x")
    driver.add(asked)
    step(engine, driver)
    assert [plan.adapters for plan in driver.executor.launched] == [()]
    assert driver.scheduler.adapters_in_use() == {adapter("y").digest}
    while engine.has_work():
        step(engine, driver)
    driver.check(base, asked)


def test_a_scored_prompt_that_waits_for_a_slot_does_not_stop_launches_ahead() -> None:
    """A step that scores a prompt is not launched ahead, so the step in flight has to end before it starts."""
    driver = Driver(max_loras=1)
    engine = Engine(driver.scheduler, driver.executor, schedules_async=True)
    running = with_adapter("x", "x", [1], max_tokens=12)
    scored = with_adapter("y", "y", [2, 3], max_tokens=2, prompt_logprobs=0)
    driver.add(running, scored)
    ahead = []
    while engine.has_work():
        step(engine, driver)
        ahead.append(len(driver.executor.launched))
    assert sum(ahead) >= 10, "launches stop while a prompt cannot start anyway"
    driver.check(running, scored)
    assert driver.samples["y", 0].prompt_logprobs == expected_prompt_logprobs(scored)


def test_a_scored_prompt_that_can_start_does_so_after_the_steps_in_flight() -> None:
    driver = Driver(max_loras=1)
    engine = Engine(driver.scheduler, driver.executor, schedules_async=True)
    driver.add(with_adapter("x", "x", [1], max_tokens=30))
    step(engine, driver)
    driver.add(with_adapter("scored", "x", [2, 3], max_tokens=1, prompt_logprobs=0))
    for _ in range(4):
        step(engine, driver)
    assert driver.samples["scored", 0].prompt_logprobs is not None, "it starves while others decode"


def test_a_forgotten_adapter_is_placed_again() -> None:
    driver = Driver(max_loras=2)
    for _ in range(2):
        driver.add(with_adapter("a", "x", [1], max_tokens=1))
        assert [len(plan.adapters) for plan in driver.run()] == [1]
        driver.scheduler.forget_adapter(adapter("x").digest)
        driver.executor.drop_adapter(adapter("x").digest)
        driver.scheduler.check_invariants()


class AnyAdapter(KvManager):
    """Planted: a stale prefix, computed with another adapter, is found."""

    def new_table(self, cache_salt: str | None = None, adapter: Adapter | None = None) -> SequenceBlocks:
        del adapter
        return super().new_table(cache_salt)


class IgnoresFlight(AdapterSlots):
    """Planted: a slot whose sequences have left is free at once, whatever rows are in flight."""

    def _free(self, in_flight: StepsInFlight, *, but: int | None = None) -> int | None:
        del in_flight
        return super()._free(StepsInFlight(), but=but)


class IgnoresHolders(AdapterSlots):
    """Planted: a slot may be taken from the sequences that run with its adapter."""

    def _free(self, in_flight: StepsInFlight, *, but: int | None = None) -> int | None:
        found = super()._free(in_flight, but=but)
        return 0 if found is None else found


def live(seed: int, slots: type[AdapterSlots] = AdapterSlots, pool: type[KvManager] = KvManager) -> None:
    """Requests with five adapters come and go at random, in sync or async steps, in a pool that is too small."""
    rng = random.Random(seed)
    is_async = rng.random() < 0.5
    driver = Driver(
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=rng.randint(5, 16),
        max_model_len=32,
        speculates=RandomPolicy(seed) if rng.random() < 0.5 else None,
        kv=pool(rng.choice([9, 16, 40]), BLOCK_SIZE),
        num_snapshots=rng.choice([None, None, 4]),
        adapters=slots(rng.randint(1, 3)),
    )
    engine = Engine(driver.scheduler, driver.executor, schedules_async=is_async, adapters=driver.executor)
    wanted: list[Request] = []
    aborted: set[str] = set()
    for i in range(60):
        if rng.random() < 0.6:
            prompt = [7] * rng.randint(1, 9) + [rng.randint(0, 2)]
            name = rng.choice([None, None, *"vwxyz"])
            wanted.append(
                with_adapter(str(i), name, prompt, max_tokens=rng.randint(1, 12), n=rng.choice([1, 1, 2]))
            )
            driver.add(wanted[-1])
        if wanted and rng.random() < 0.15:
            aborted.add(rng.choice(wanted).request_id)
            driver.abort(max(aborted))
        for digest in driver.executor.loaded - engine.adapters_in_use():
            if rng.random() < 0.2:
                engine.drop_adapter(digest)
        step(engine, driver)
    while engine.has_work():
        step(engine, driver)
    assert engine.adapters_in_use() == set()
    driver.check(*[each for each in wanted if each.request_id not in aborted])


def step(engine: Engine, driver: Driver) -> None:
    for delta in engine.step():
        driver.samples[delta.request_id, delta.index].hear(delta)
    driver.scheduler.check_invariants()


@pytest.mark.parametrize("seed", range(40))
def test_every_sample_comes_to_what_its_adapter_says(seed: int) -> None:
    live(seed)


@pytest.mark.parametrize(
    "planted", [{"pool": AnyAdapter}, {"slots": IgnoresFlight}, {"slots": IgnoresHolders}], ids=str
)
def test_a_stale_prefix_and_a_stolen_slot_are_noticed(planted: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):  # noqa: PT012
        for seed in range(60):
            live(seed, **planted)
