"""What every partition promises, tried on those of a CPU: both calls run, are timed, and fail together.

Bugs that these tests have caught are named where they are caught.
"""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from faser.engine.execution.overlap.lanes import make_partition
from faser.engine.execution.overlap.partition import (
    EVERYTHING,
    Lane,
    OverlapResult,
    Partition,
    Serial,
    synchronous,
)
from faser.errors import ConfigError

pytestmark = pytest.mark.alone

D = TypeVar("D")
V = TypeVar("V")

USABLE = sorted(os.sched_getaffinity(0))
two_cores = pytest.mark.skipif(len(USABLE) < 2, reason="needs two cores")
ANY = ["serial", pytest.param("cores", marks=two_cores)]


@pytest.fixture(params=ANY)
def partition(request: pytest.FixtureRequest) -> Iterator[Partition]:
    """Every partition in turn."""
    partition = make_partition(request.param)
    yield partition
    partition.close()


def test_serial_lanes_take_turns_on_everything() -> None:
    order: list[str] = []

    def draft(lane: Lane, verify_done: Callable[[], bool]) -> bool:
        order.append("draft")
        assert lane == EVERYTHING
        return verify_done()

    def verify(lane: Lane) -> int:
        order.append("verify")
        assert lane == EVERYTHING
        return threading.get_ident()

    joined = Serial().run_both(draft, synchronous(verify))
    assert (joined.drafted, joined.verified) == (False, threading.get_ident())
    assert order == ["draft", "verify"]
    assert joined.overlap_s == 0
    assert Serial().shares() == ()
    with pytest.raises(ConfigError, match=r"share of 0\.5"):
        Serial().resize(0.5)


@pytest.mark.parametrize("seed", range(8))
def test_both_are_done_and_timed_whatever_they_take(partition: Partition, seed: int) -> None:
    """Oracle: clocks read within the calls. Caught: a join that does not wait for the draft."""
    chance = random.Random(seed)
    for turn in range(12):
        pauses = [chance.choice((0.0, 0.0, chance.random() * 0.004)) for _ in range(2)]
        busy: dict[str, tuple[float, float]] = {}

        joined = timed_pair(partition, turn, pauses, busy)
        assert (joined.drafted, joined.verified) == ((turn, "draft"), (turn, "verify"))
        check_times(joined, busy)


def timed_pair(
    partition: Partition, turn: int, pauses: list[float], busy: dict[str, tuple[float, float]]
) -> OverlapResult[tuple[int, str], tuple[int, str]]:
    """Both lanes pause, and say in `busy` from when to when."""

    def work(name: str, pause: float) -> tuple[int, str]:
        began = time.perf_counter()
        time.sleep(pause)
        busy[name] = (began, time.perf_counter())
        return turn, name

    return partition.run_both(
        lambda _lane, _done: work("draft", pauses[0]), synchronous(lambda _lane: work("verify", pauses[1]))
    )


def check_times(joined: OverlapResult[D, V], busy: dict[str, tuple[float, float]]) -> None:
    """Each lane's times enclose its call's, and the overlap is no less than that of the calls."""
    times = {
        "draft": (joined.draft_began_s, joined.draft_ended_s),
        "verify": (joined.verify_began_s, joined.verify_ended_s),
    }
    for name, (began, ended) in busy.items():
        assert joined.began_s <= times[name][0] <= began <= ended <= times[name][1] <= time.perf_counter()
    within = min(ended for _, ended in busy.values()) - max(began for began, _ in busy.values())
    assert max(0.0, within) <= joined.overlap_s


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_of_one_lane_waits_for_the_other(partition: Partition, kind: type[BaseException]) -> None:
    """Caught: an error that leaves the other lane running."""
    ended: list[str] = []

    def fails(*_: object) -> None:
        raise kind("this lane")

    def works(*_: object) -> None:
        time.sleep(0.02)
        ended.append("done")

    for draft, verify in ((fails, works), (works, fails)):
        ended.clear()
        before = os.sched_getaffinity(0)
        with pytest.raises(kind, match="this lane"):
            partition.run_both(draft, synchronous(verify))
        assert ended == ["done"]
        assert os.sched_getaffinity(0) == before
    assert partition.run_both(lambda _lane, _done: 1, synchronous(lambda _lane: 2)).verified == 2


def test_of_two_errors_the_verifiers_is_raised_and_the_drafts_noted(partition: Partition) -> None:
    def fail(name: str) -> None:
        raise ValueError(name)

    with pytest.raises(ValueError, match="verify") as caught:
        partition.run_both(lambda _lane, _done: fail("draft"), synchronous(lambda _lane: fail("verify")))
    assert "ValueError('draft')" in caught.value.__notes__[0]
