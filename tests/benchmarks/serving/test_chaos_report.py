"""Broken promises are found: a run without fault is planted with one at a time."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.servers import Holdings
from benchmarks.serving.chaos_clients import TOKENS
from benchmarks.serving.chaos_report import (
    HANG,
    KILL,
    Fault,
    Outcome,
    Sample,
    broken_promises,
    growth,
    last_life,
)

IDLE = Holdings(
    front_end_descriptors=20,
    front_end_threads=4,
    front_end_tasks=5,
    engine_descriptors=10,
    engine_threads=8,
    gauges={"num_requests_running": 0.0, "kv_cache_usage_perc": 0.0},
)


def samples(front_end: Callable[[int], int], engine: Callable[[int], int]) -> list[Sample]:
    """Two minutes; the engine is another one after 20 seconds, and absent in between."""
    return [
        Sample(
            at_s=second,
            front_end=front_end(second),
            engine=None if second == 20 else engine(second),
            engine_pid=None if second == 20 else 1 + (second > 20),
            descriptors=20,
        )
        for second in range(120)
    ]


def flat(_: int) -> int:
    return 500_000_000


def kept() -> Outcome:
    """Every promise is kept."""
    return Outcome(
        before=IDLE,
        engine_timeout_s=10.0,
        after=IDLE,
        exit_status=0,
        counts=Counter({("answer", TOKENS): 7}),
        faults=[Fault(kind=KILL, at_s=20.0, ready_s=9.0), Fault(kind=HANG, at_s=40.0, ready_s=35.0)],
        samples=samples(flat, flat),
    )


def test_a_run_without_fault_keeps_all_promises() -> None:
    assert broken_promises(kept()) == []


@pytest.mark.parametrize(
    "field, value, expected",
    [
        ("violations", ["stream at 3 s: a stream without an end"], "a stream without an end"),
        ("after", replace(IDLE, gauges={"kv_cache_usage_perc": 0.01}), "kv_cache_usage_perc is 0.01"),
        ("after", replace(IDLE, front_end_descriptors=23), "descriptors of the front-end: 23"),
        ("after", replace(IDLE, front_end_tasks=6), "tasks of the front-end: 6"),
        ("after", replace(IDLE, front_end_threads=40), "threads of the front-end: 40"),
        ("after", replace(IDLE, engine_threads=9), "threads of the engine: 9"),
        ("after", None, "did not come to rest"),
        ("faults", [Fault(kind=KILL, at_s=20.0, ready_s=31.0)], "after the kill at 20 s"),
        ("faults", [Fault(kind=HANG, at_s=20.0, ready_s=41.0)], "after the hang at 20 s"),
        ("faults", [Fault(kind=KILL, at_s=20.0, ready_s=None)], "ready after None s"),
        ("samples", samples(lambda second: 10**8 + 10**6 * second, flat), "memory of the front_end grew"),
        ("samples", samples(flat, lambda second: 10**8 + 10**6 * second), "memory of the engine grew"),
        ("counts", Counter({("answer", "error"): 7}), "no client got an answer"),
        ("exit_status", None, "exit status was None"),
    ],
)
def test_each_broken_promise_is_found(field: str, value: object, expected: str) -> None:
    outcome = kept()
    setattr(outcome, field, value)
    (found,) = broken_promises(outcome)
    assert expected in found


def test_growth_leaves_out_the_warm_up_and_single_jumps() -> None:
    assert growth([*range(1, 31), *[30] * 60], warm_up=1 / 3) == 0
    assert growth([30] * 89 + [90], warm_up=1 / 3) == 0
    assert growth([100] * 60 + [120] * 30, warm_up=1 / 3) == pytest.approx(0.2)


def test_the_engine_is_judged_by_its_last_life() -> None:
    assert last_life(samples(flat, lambda second: 1 + (second > 20))) == [2] * 99
