"""What lanes cost each other, measured on work whose cost is known: it sleeps, longer where it should be slower.

Bugs these tests have been seen to catch are named where they are caught.
"""

import os
import threading
import time
from collections.abc import Iterator
from typing import TypeVar

import pytest

from faser.engine.co_run_profile import measure_slowdown
from faser.engine.partition import EVERYTHING, Cores, Draft, Joined, Lane, Serial, Verify

D = TypeVar("D")
V = TypeVar("V")

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores"),
]


@pytest.fixture
def lanes() -> Iterator[Cores]:
    lanes = Cores()
    yield lanes
    lanes.close()


class Machine:
    """Work takes whole_s on everything, `narrow` times that on a lane, and `crowded` times that in company."""

    def __init__(self) -> None:
        self._busy: set[str] = set()
        self._lock = threading.Lock()

    def work(self, name: str, lane: Lane, whole_s: float, narrow: float, crowded: float) -> None:
        """In small pieces, so that company counts for as long as it is there."""
        with self._lock:
            self._busy.add(name)
        for _ in range(10):
            factor = 1.0 if lane == EVERYTHING else narrow * (crowded if len(self._busy) > 1 else 1.0)
            time.sleep(whole_s / 10 * factor)
        with self._lock:
            self._busy.discard(name)


@pytest.mark.parametrize("quick", ["verify", "draft"])
def test_slowdowns_are_those_of_the_machine(lanes: Cores, quick: str) -> None:
    """Whichever lane is the quicker one. Caught: the quicker one not repeated, alone and beside confused."""
    machine = Machine()
    verify_s, draft_s = (0.004, 0.016) if quick == "verify" else (0.016, 0.004)
    found = measure_slowdown(
        lanes,
        lambda lane: machine.work("verify", lane, verify_s, 1.5, 2.0),
        lambda lane: machine.work("draft", lane, draft_s, 2.0, 3.0),
        budget_s=1.0 * len(lanes.shares()),
    )
    assert [each.share for each in found] == list(lanes.shares())
    for each in found:
        measured = (each.verify_alone, each.draft_alone, each.verify, each.draft)
        for got, wanted in zip(measured, (1.5, 2.0, 3.0, 6.0), strict=True):
            assert wanted / 1.4 < got < wanted * 1.4, measured


class ManyShares:
    """Lanes that offer more shares than this machine may have, and remember which were tried."""

    name = "many"
    share = 0.25

    def __init__(self, lanes: Cores) -> None:
        self._lanes = lanes
        self.tried: list[float] = []

    def shares(self) -> tuple[float, ...]:
        return (0.125, 0.25, 0.5)

    def resize(self, share: float) -> None:
        self.share = share
        self.tried.append(share)

    def both(self, draft: Draft[D], verify: Verify[V]) -> Joined[D, V]:
        return self._lanes.both(draft, verify)

    def close(self) -> None:
        pass


def test_a_small_budget_still_gives_every_share_an_answer_and_the_old_share_comes_back(lanes: Cores) -> None:
    """One round that warms up, one that counts. Caught: a share left as the last one tried."""
    many = ManyShares(lanes)
    found = measure_slowdown(many, lambda _lane: time.sleep(0.001), lambda _lane: time.sleep(0.001), budget_s=0.0)
    assert [each.share for each in found] == [0.125, 0.25, 0.5]
    assert many.tried == [0.125, 0.25, 0.5, 0.125, 0.25, 0.5, 0.25]


def test_where_nothing_runs_at_the_same_time_nothing_is_measured() -> None:
    assert measure_slowdown(Serial(), _fail, _fail) == ()


def test_an_error_of_the_work_ends_the_measurement(lanes: Cores) -> None:
    """Caught: company that waits for a lane which has failed."""

    def fails_in_company(lane: Lane) -> None:
        if lane != EVERYTHING:
            raise ValueError("no such kernel")

    with pytest.raises(ValueError, match="no such kernel"):
        measure_slowdown(lanes, lambda _lane: time.sleep(0.001), fails_in_company)
    with pytest.raises(ValueError, match="no such kernel"):
        measure_slowdown(lanes, fails_in_company, lambda _lane: time.sleep(0.001))


def _fail(_lane: Lane) -> None:
    raise AssertionError("called")
