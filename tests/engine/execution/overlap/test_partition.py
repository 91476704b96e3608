"""Lanes: both run, at the same time, where they belong, and nothing is left running.

What every partition promises is tried on all of them. Bugs these tests have been seen to catch are named where
they are caught.
"""

import gc
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from faser.engine.execution.overlap.partition import (
    EVERYTHING,
    Cores,
    Draft,
    Lane,
    OverlapResult,
    Partition,
    Serial,
    at_once,
    core_numbers,
    draft_widths,
    make_partition,
)
from faser.errors import ConfigError

pytestmark = pytest.mark.alone

D = TypeVar("D")
V = TypeVar("V")

USABLE = sorted(os.sched_getaffinity(0))
two_cores = pytest.mark.skipif(len(USABLE) < 2, reason="needs two cores")
ANY = ["serial", pytest.param("cores", marks=two_cores)]


@pytest.fixture
def lanes() -> Iterator[Cores]:
    lanes = Cores()
    yield lanes
    lanes.close()


@pytest.fixture(params=ANY)
def partition(request: pytest.FixtureRequest) -> Iterator[Partition]:
    """Every partition in turn."""
    partition = make_partition(request.param)
    yield partition
    partition.close()


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
    joined = lanes.both(lambda _lane, _done: meet.wait(10), at_once(lambda _lane: meet.wait(10)))
    assert {joined.drafted, joined.verified} == {0, 1}
    assert joined.overlap_s > 0


@two_cores
def test_each_lanes_thread_is_on_the_first_of_its_cores_and_the_callers_goes_back(lanes: Cores) -> None:
    """Caught: lanes swapped, a caller that stays on its lane."""

    def where(lane: Lane) -> tuple[Lane, set[int], int]:
        return lane, os.sched_getaffinity(0), threading.get_native_id()

    for share in (*lanes.shares(), *reversed(lanes.shares())):
        lanes.resize(share)
        joined = lanes.both(lambda lane, _done: where(lane), at_once(where))
        (draft_lane, on_draft, draft_task), (verify_lane, on_verify, verify_task) = joined.drafted, joined.verified
        assert draft_lane.cores is not None
        assert verify_lane.cores is not None
        assert (*verify_lane.cores, *draft_lane.cores) == tuple(USABLE)
        assert len(draft_lane.cores) == round(share * len(USABLE))
        assert (on_draft, on_verify) == ({draft_lane.cores[0]}, {verify_lane.cores[0]})
        assert verify_task == threading.get_native_id() != draft_task
        assert os.sched_getaffinity(0) == set(USABLE)


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

    joined = Serial().both(draft, at_once(verify))
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

    return partition.both(
        lambda _lane, _done: work("draft", pauses[0]), at_once(lambda _lane: work("verify", pauses[1]))
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


@two_cores
def test_a_draft_sees_that_nobody_waits_for_more(lanes: Cores) -> None:
    """Caught: a flag that is raised only after the join."""
    began = threading.Event()

    def draft(_lane: Lane, verify_done: Callable[[], bool]) -> tuple[bool, bool]:
        first = verify_done()
        began.set()
        ends = time.monotonic() + 10
        while not verify_done() and time.monotonic() < ends:
            time.sleep(0.0005)
        return first, verify_done()

    assert lanes.both(draft, at_once(lambda _lane: began.wait(10))).drafted == (False, True)
    assert lanes.both(lambda _lane, done: done(), at_once(lambda _lane: time.sleep(0.05))).drafted is False


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
            partition.both(draft, at_once(verify))
        assert ended == ["done"]
        assert os.sched_getaffinity(0) == before
    assert partition.both(lambda _lane, _done: 1, at_once(lambda _lane: 2)).verified == 2


def test_of_two_errors_the_verifiers_is_raised_and_the_drafts_noted(partition: Partition) -> None:
    def fail(name: str) -> None:
        raise ValueError(name)

    with pytest.raises(ValueError, match="verify") as caught:
        partition.both(lambda _lane, _done: fail("draft"), at_once(lambda _lane: fail("verify")))
    assert "ValueError('draft')" in caught.value.__notes__[0]


@two_cores
def test_a_thousand_co_runs_leave_nothing_behind(lanes: Cores) -> None:
    """Caught: a thread for every call."""
    lanes.both(nothing, at_once(lambda _lane: None))
    threads, tasks = lane_threads(), set(os.listdir("/proc/self/task"))
    for turn in range(1000):
        joined = lanes.both(echo(turn), at_once(lambda _lane: None))
        assert joined.drafted == turn
    assert lane_threads() == threads
    assert set(os.listdir("/proc/self/task")) <= tasks


@two_cores
def test_a_lane_that_waits_keeps_nothing_alive(lanes: Cores) -> None:
    """Caught: the last call kept by the thread while it waits for the next."""

    class Result:
        pass

    drafted = lanes.both(lambda _lane, _done: Result(), at_once(lambda _lane: None)).drafted
    result = weakref.ref(drafted)
    del drafted
    ends = time.monotonic() + 5
    while result() is not None and time.monotonic() < ends:
        time.sleep(0.001)
    assert result() is None


@two_cores
def test_lanes_end_when_closed_and_when_forgotten() -> None:
    """Caught: a thread that keeps its partition alive."""
    before = lane_threads()
    lanes = Cores()
    assert lane_threads() == before, "a thread that nobody has used yet"
    lanes.both(nothing, at_once(lambda _lane: None))
    assert len(lane_threads()) == len(before) + 1
    lanes.close()
    lanes.close()
    assert lane_threads() == before
    forgotten = Cores()
    forgotten.both(nothing, at_once(lambda _lane: None))
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


def test_lanes_on_cores_of_others_are_refused() -> None:
    foreign = max(USABLE) + 1
    with pytest.raises(ConfigError, match="this process may use") as caught:
        Cores((USABLE[0], foreign))
    assert str([USABLE[0], foreign]) in str(caught.value)


def test_the_factory_knows_its_partitions_and_refuses_the_others_by_name() -> None:
    assert make_partition("serial").name == "serial"
    assert make_partition("auto", (USABLE[0],)).name == "serial"
    for name in ("streams", "sm"):
        with pytest.raises(ConfigError, match=f"partition {name} divides a GPU"):
            make_partition(name)
    with pytest.raises(ConfigError, match="partition is halves; it must be auto, serial or cores"):
        make_partition("halves")


@two_cores
def test_where_there_are_two_cores_they_are_divided() -> None:
    assert make_partition("auto").name == "cores"
    assert core_numbers(1) == (USABLE[0],)
    assert set(core_numbers()) <= set(USABLE)
