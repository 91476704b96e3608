"""What every partition promises, tried on those of a CPU: both calls run, are timed, and fail together.

On cores they run at the same time, and no thread outlives them.

Bugs that these tests have caught are named where they are caught.
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

from faser.engine.execution.overlap.lanes import make_partition
from faser.engine.execution.overlap.partition import (
    EVERYTHING,
    Cores,
    Draft,
    Lane,
    OverlapResult,
    Partition,
    Serial,
    draft_widths,
    synchronous,
)
from faser.errors import ConfigError
from tests.waiting import PATIENCE_S, until

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
    meet = threading.Barrier(2, timeout=PATIENCE_S)
    joined = lanes.run_both(lambda _lane, _done: meet.wait(), synchronous(lambda _lane: meet.wait()))
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
        until(verify_done)
        return first, verify_done()

    for _ in range(2):  # the flag goes down again
        began.clear()
        drafted = lanes.run_both(draft, synchronous(lambda _lane: began.wait(PATIENCE_S))).drafted
        assert drafted == (False, True)


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
    until(lambda: result() is None)


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
