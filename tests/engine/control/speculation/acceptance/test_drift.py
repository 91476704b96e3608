"""Alarms of drift. Oracle: tokens drawn at the expected rate, and at another one."""

import numpy as np
import pytest
from numpy.typing import NDArray

from faser.engine.control.speculation.acceptance.drift import Drift

Floats = NDArray[np.float64]

CAP = 3
SLOTS, METHODS = np.arange(2), np.array([0, 1])


def counts(*accepted: int) -> Floats:
    """[S, 2, CAP] drafts of CAP tokens, with these numbers of accepted tokens."""
    found = np.zeros((len(accepted), 2, CAP))
    for line, number in zip(found, accepted, strict=True):
        line[0, : number + 1] = 1
        line[1, :number] = 1
    return found


def first_alarm(rate: float, believed: float, *, steps: int) -> tuple[int, list[int], list[int]]:
    """Tokens at `rate` in slot 0, as believed in slot 1: after how many steps an alarm comes, and whose."""
    rng = np.random.default_rng(0)
    drift = Drift(2, 2)
    expected = np.full((2, CAP), believed)
    for step in range(1, steps + 1):
        good = (rng.random((2, CAP)) < [[rate], [believed]]).cumprod(axis=1).sum(axis=1)
        alarm = drift.watch(SLOTS, METHODS, expected, counts(*good.tolist()))
        if alarm is not None:
            return step, alarm[0].tolist(), alarm[1].tolist()
    return steps + 1, [], []


@pytest.mark.parametrize("rate, believed", [(0.1, 0.9), (0.95, 0.2)])
def test_a_slot_that_contradicts_its_evidence_is_named_soon(rate: float, believed: float) -> None:
    step, slots, methods = first_alarm(rate, believed, steps=100)
    assert step <= 12
    assert slots == [0]
    assert methods == []


@pytest.mark.parametrize("rate", [0.2, 0.6, 0.9])
def test_tokens_as_expected_raise_no_alarm(rate: float) -> None:
    assert first_alarm(rate, rate, steps=200)[1:] == ([], [])


def test_a_method_is_named_when_many_slots_are_a_little_worse() -> None:
    drift = Drift(32, 2)
    all_slots, methods = np.arange(32), np.ones(32, dtype=np.int64)
    alarm = drift.watch(all_slots, methods, np.full((32, CAP), 0.7), counts(*[0] * 32))
    assert alarm is not None
    assert (alarm[0].tolist(), alarm[1].tolist()) == ([], [1])


def test_a_new_sequence_and_an_alarm_start_anew() -> None:
    drift, one, expected = Drift(1, 1), np.zeros(1, dtype=np.int64), np.full((1, CAP), 0.9)

    def steps_to_alarm() -> int:
        alarms = (drift.watch(one, one, expected, counts(0)) for _ in range(20))
        return next(i for i, alarm in enumerate(alarms) if alarm is not None and len(alarm[0]))

    needed = steps_to_alarm()
    assert needed == steps_to_alarm() > 1
    drift.watch(one, one, expected, counts(0))
    drift.start(0)
    assert steps_to_alarm() == needed
