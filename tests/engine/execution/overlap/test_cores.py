"""Cores: both lanes run at the same time, each on its own cores, and no thread outlives them.

Bugs that these tests have caught are named where they are caught.
"""

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from faser.engine.execution.overlap.lanes import make_partition
from faser.engine.execution.overlap.partition import (
    Cores,
    Draft,
    Lane,
    draft_widths,
    synchronous,
)
from faser.errors import ConfigError

pytestmark = pytest.mark.alone

D = TypeVar("D")
V = TypeVar("V")

USABLE = sorted(os.sched_getaffinity(0))
two_cores = pytest.mark.skipif(len(USABLE) < 2, reason="needs two cores")


@pytest.fixture
def lanes() -> Iterator[Cores]:
    lanes = Cores()
    yield lanes
    lanes.close()


def nothing(_lane: Lane, _verify_done: Callable[[], bool]) -> None:
    return None


def echo(number: int) -> Draft[int]:
    return lambda _lane, _done: number


def lane_threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "draft-lane"}


@two_cores
def test_both_lanes_run_at_the_same_time(lanes: Cores) -> None:
    """Each waits for the other. Caught: lanes that take turns."""
    meet = threading.Barrier(2)
    joined = lanes.run_both(lambda _lane, _done: meet.wait(10), synchronous(lambda _lane: meet.wait(10)))
    assert {joined.drafted, joined.verified} == {0, 1}
    assert joined.overlap_s > 0


@two_cores
def test_each_lanes_thread_is_on_the_first_of_its_cores_and_the_callers_goes_back(lanes: Cores) -> None:
    """Caught: lanes swapped, a caller that stays on its lane."""

    def where(lane: Lane) -> tuple[Lane, set[int], int]:
        return lane, os.sched_getaffinity(0), threading.get_native_id()

    for share in (*lanes.shares(), *reversed(lanes.shares())):
        lanes.resize(share)
        joined = lanes.run_both(lambda lane, _done: where(lane), synchronous(where))
        (draft_lane, on_draft, draft_task), (verify_lane, on_verify, verify_task) = joined.drafted, joined.verified
        assert draft_lane.cores is not None
        assert verify_lane.cores is not None
        assert (*verify_lane.cores, *draft_lane.cores) == tuple(USABLE)
        assert len(draft_lane.cores) == round(share * len(USABLE))
        assert (on_draft, on_verify) == ({draft_lane.cores[0]}, {verify_lane.cores[0]})
        assert verify_task == threading.get_native_id() != draft_task
        assert os.sched_getaffinity(0) == set(USABLE)


@two_cores
def test_a_draft_sees_that_verification_is_done(lanes: Cores) -> None:
    """Caught: a flag that is raised only after the join."""
    began = threading.Event()

    def draft(_lane: Lane, verify_done: Callable[[], bool]) -> tuple[bool, bool]:
        first = verify_done()
        began.set()
        ends = time.monotonic() + 10
        while not verify_done() and time.monotonic() < ends:
            time.sleep(0.0005)
        return first, verify_done()

    assert lanes.run_both(draft, synchronous(lambda _lane: began.wait(10))).drafted == (False, True)
    assert lanes.run_both(lambda _lane, done: done(), synchronous(lambda _lane: time.sleep(0.05))).drafted is False


@two_cores
def test_a_thousand_runs_leave_no_thread_or_task(lanes: Cores) -> None:
    """Caught: a thread for every call."""
    lanes.run_both(nothing, synchronous(lambda _lane: None))
    threads, tasks = lane_threads(), set(os.listdir("/proc/self/task"))
    for turn in range(1000):
        joined = lanes.run_both(echo(turn), synchronous(lambda _lane: None))
        assert joined.drafted == turn
    assert lane_threads() == threads
    assert set(os.listdir("/proc/self/task")) <= tasks


@two_cores
def test_a_lane_that_waits_keeps_nothing_alive(lanes: Cores) -> None:
    """Caught: the last call kept by the thread while it waits for the next."""

    class Result:
        pass

    drafted = lanes.run_both(lambda _lane, _done: Result(), synchronous(lambda _lane: None)).drafted
    result = weakref.ref(drafted)
    del drafted
    ends = time.monotonic() + 5
    while result() is not None and time.monotonic() < ends:
        time.sleep(0.001)
    assert result() is None


@two_cores
def test_the_thread_ends_when_lanes_are_closed_or_collected() -> None:
    """Caught: a thread that keeps its partition alive."""
    before = lane_threads()
    lanes = Cores()
    assert lane_threads() == before, "the thread is made at first use"
    lanes.run_both(nothing, synchronous(lambda _lane: None))
    assert len(lane_threads()) == len(before) + 1
    lanes.close()
    lanes.close()
    assert lane_threads() == before
    forgotten = Cores()
    forgotten.run_both(nothing, synchronous(lambda _lane: None))
    del forgotten
    gc.collect()
    assert lane_threads() == before


def test_shares_are_few_and_leave_both_lanes_a_core() -> None:
    for num_cores in range(2, 200):
        widths = draft_widths(num_cores)
        assert list(widths) == sorted(set(widths))
        assert 1 <= len(widths) <= 3
        assert widths[0] == 1
        assert all(1 <= width <= num_cores - width for width in widths)


@two_cores
def test_a_share_that_is_not_offered_is_refused_with_those_that_are(lanes: Cores) -> None:
    share = lanes.share
    with pytest.raises(ConfigError, match=r"share is 0\.37; .*one of \(") as caught:
        lanes.resize(0.37)
    assert str(lanes.shares()) in str(caught.value)
    assert lanes.share == share


@pytest.mark.parametrize("cores", [(), (USABLE[0],), (USABLE[0], USABLE[0])])
def test_lanes_on_fewer_than_two_cores_are_refused(cores: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="at least 2 usable cores") as caught:
        make_partition("cores", cores)
    assert str(list(cores)) in str(caught.value)


def test_cores_that_the_process_may_not_use_are_refused() -> None:
    foreign = max(USABLE) + 1
    with pytest.raises(ConfigError, match="this process may use") as caught:
        Cores((USABLE[0], foreign))
    assert str([USABLE[0], foreign]) in str(caught.value)
