"""Requests come at their times, whatever the engine is doing, and their times count from then on."""

import pytest

from benchmarks.ablation.drive import Ask, Driven, Load, closed_loop, open_loop
from faser.errors import EngineError
from tests.benchmarks.ablation.loaded_engine import STEP_S, LoadedEngine


def load_of(*times_and_lengths: tuple[float, int], seconds: float = 100.0, name: str = "a") -> Load:
    asks = [
        Ask(at_s=at_s, prompt_token_ids=(1, 2), output_tokens=length, seed=place)
        for place, (at_s, length) in enumerate(times_and_lengths)
    ]
    return Load(name=name, asks=asks, seconds=seconds)


def driven(engine: LoadedEngine, load: Load) -> Driven:
    return open_loop(engine, load, engine.clock)


def test_who_comes_during_a_step_is_admitted_behind_it_and_has_waited_since() -> None:
    engine = LoadedEngine()
    found = driven(engine, load_of((0.0, 3), (0.15, 2)))
    assert [at_s for at_s, _ in engine.asked] == pytest.approx([0.0, 0.2])
    second = found.outcome.served[1]
    assert (second.arrival_s, second.first_s, second.finished_s) == pytest.approx((0.15, 0.3, 0.4))


def test_an_idle_engine_waits_for_the_next_arrival_and_takes_no_step() -> None:
    engine = LoadedEngine()
    found = driven(engine, load_of((0.0, 1), (5.0, 1)))
    assert engine.slept_s == pytest.approx(4.9)
    assert found.outcome.num_steps == 2
    assert found.outcome.busy_s == pytest.approx(2 * STEP_S)
    assert found.outcome.elapsed_s == pytest.approx(5.1)


def test_answers_come_in_the_order_of_the_asks_and_in_full() -> None:
    found = driven(LoadedEngine(places=1), load_of((0.0, 4), (0.0, 2), (0.1, 1)))
    assert found.answers == ((0, 1, 2, 3), (0, 1), (0,))
    assert [each.num_tokens for each in found.outcome.served] == [4, 2, 1]


def test_tokens_that_come_after_the_arrivals_are_not_the_windows() -> None:
    found = driven(LoadedEngine(), load_of((0.0, 8), seconds=0.45))
    assert found.outcome.window_tokens == 4


def test_counters_are_of_this_run_alone() -> None:
    engine = LoadedEngine()
    engine.use_policy("fixed", 1)
    driven(engine, load_of((0.0, 8)))
    second = driven(engine, load_of((0.0, 4), name="b"))
    assert (second.outcome.turns, second.outcome.verified) == (2, 2)
    assert second.ahead_steps == 0


def test_steps_on_lanes_are_counted() -> None:
    engine = LoadedEngine()
    engine.use_policy("faser", overlap="auto")
    assert driven(engine, load_of((0.0, 5))).ahead_steps == 5


def test_a_request_that_fails_ends_the_measurement() -> None:
    with pytest.raises(EngineError, match="a/0 failed: the model"):
        driven(LoadedEngine(fails=True), load_of((0.0, 5)))


def test_an_engine_without_a_drafter_cannot_be_measured() -> None:
    with pytest.raises(EngineError, match="without a drafter"):
        driven(LoadedEngine(has_drafter=False), load_of((0.0, 1)))


@pytest.mark.parametrize(("clients", "first_ends_s"), [(1, 0.5), (3, 0.3)])
def test_capacity_is_what_full_places_bring_once_the_first_has_ended(clients: int, first_ends_s: float) -> None:
    engine = LoadedEngine(places=clients)
    load = load_of((0.0, 5), (7.0, 3), (9.0, 4), seconds=6.0)
    tokens_per_s, ended = closed_loop(engine, load, clients=clients, clock=engine.clock)
    assert tokens_per_s == pytest.approx(clients / STEP_S)
    assert engine.now_s == pytest.approx(first_ends_s + 6.0, abs=1.1 * STEP_S)
    assert not engine.has_work()
    assert all(each.num_tokens > 2 for each in ended)
    assert len(ended) > 10 * clients


def test_no_two_requests_share_a_salt_so_none_is_helped_by_another() -> None:
    engine = LoadedEngine()
    driven(engine, load_of((0.0, 2), (0.0, 2), name="a"))
    closed_loop(engine, load_of((0.0, 2), seconds=1.0, name="b"), clients=2, clock=engine.clock)
    salts = [request.cache_salt for _, request in engine.asked]
    assert None not in salts
    assert len(set(salts)) == len(salts) > 4
