"""Lanes on CUDA streams: each lane's work is on its stream, ordered with all other work, and done at the join.

Without a GPU: the device is a clock that knows which work comes after which (fake_lane_device), the driver counts
its handles (fake_green_driver). Bugs that these tests have caught are named where they are caught.
"""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from faser.engine.execution.overlap.lanes import make_gpu_partition
from faser.engine.execution.overlap.partition import (
    Lane,
    Partition,
    PendingResult,
    synchronous,
)
from faser.engine.execution.overlap.streams import plain_streams
from faser.errors import ConfigError
from tests.kernels.cuda.fake_green_driver import FakeGreenDriver
from tests.kernels.cuda.fake_lane_device import FakeLaneDevice, FakeStream
from tests.waiting import until


@pytest.fixture
def device() -> FakeLaneDevice:
    return FakeLaneDevice()


@pytest.fixture(params=["streams", "sm"])
def partition(request: pytest.FixtureRequest, device: FakeLaneDevice) -> Iterator[Partition]:
    """Both partitions of a GPU."""
    partition, refused = make_gpu_partition(request.param, device, FakeGreenDriver)
    assert refused is None
    assert partition.name == request.param
    yield partition
    partition.close()


def stream_of(lane: Lane) -> FakeStream:
    assert lane.device_lane is not None
    assert isinstance(lane.device_lane.stream, FakeStream)
    return lane.device_lane.stream


def lane_threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "draft-lane"}


def test_each_lanes_work_is_on_its_stream_and_on_the_callers_thread(
    partition: Partition, device: FakeLaneDevice
) -> None:
    """Caught: the draft on the caller's stream, lanes swapped, a caller that stays on its lane's stream."""

    def where(lane: Lane) -> tuple[Lane, FakeStream, int]:
        return lane, device.current, threading.get_ident()

    for share in (*partition.shares(), *reversed(partition.shares())):
        partition.resize(share)
        joined = partition.run_both(lambda lane, _done: where(lane), synchronous(where))
        (draft_lane, on_draft, draft_thread), (verify_lane, on_verify, verify_thread) = (
            joined.drafted,
            joined.verified,
        )
        assert (on_draft, on_verify) == (stream_of(draft_lane), stream_of(verify_lane))
        assert len({on_draft, on_verify, device.default}) == 3
        assert verify_thread == draft_thread == threading.get_ident()
        assert device.current is device.default
        assert draft_lane.device_lane is not None
        assert verify_lane.device_lane is not None
        assert (draft_lane.device_lane.name, verify_lane.device_lane.name) == ("draft", "verify")
        assert draft_lane.device_lane.share == share == partition.share
        assert verify_lane.device_lane.share == pytest.approx(1 - share)
        assert draft_lane.cores is verify_lane.cores is None


def test_a_share_always_has_the_same_streams(partition: Partition) -> None:
    """CUDA graphs are captured for a stream. Caught: streams made when lanes are resized."""
    found: dict[float, set[tuple[FakeStream, FakeStream]]] = {}
    for _ in range(3):
        for share in partition.shares():
            partition.resize(share)
            joined = partition.run_both(lambda lane, _done: stream_of(lane), synchronous(stream_of))
            found.setdefault(share, set()).add((joined.drafted, joined.verified))
    assert all(len(each) == 1 for each in found.values())
    assert len({stream for each in found.values() for pair in each for stream in pair}) == 2 * len(found)


def test_each_lane_waits_for_earlier_work_and_not_for_the_other_lane(
    partition: Partition, device: FakeLaneDevice
) -> None:
    """Caught: a lane that does not wait for the caller's stream; lanes that wait for each other."""
    device.work("inputs", 0.005)
    verify = synchronous(lambda _lane: device.work("verify"))
    joined = partition.run_both(lambda _lane, _done: device.work("draft"), verify)
    assert joined.drafted == joined.verified == {"inputs"}


def test_work_after_the_join_waits_for_both_lanes(partition: Partition, device: FakeLaneDevice) -> None:
    """Caught: a caller's stream that waits for one lane only, events that count as recorded too early."""
    expected = {"before"}
    device.work("before")
    for turn in range(5):
        seen = partition.run_both(
            lambda _lane, _done, turn=turn: device.work(f"draft {turn}", 0.001),  # type: ignore[misc]
            synchronous(lambda _lane, turn=turn: device.work(f"verify {turn}", 0.001)),  # type: ignore[misc]
        )
        assert expected <= seen.drafted
        assert expected <= seen.verified
        expected |= {f"draft {turn}", f"verify {turn}"}
        assert device.work(f"after {turn}") >= expected


@pytest.mark.parametrize("draft_s, verify_s", [(0.03, 0.0), (0.0, 0.03), (0.02, 0.02)])
def test_what_a_lane_used_may_be_freed_after_the_join(
    partition: Partition, device: FakeLaneDevice, draft_s: float, verify_s: float
) -> None:
    """Calls return while the device still works. Caught: a host that waits for no lane, or for one."""
    partition.run_both(
        lambda _lane, _done: device.work("draft", draft_s),
        synchronous(lambda _lane: device.work("verify", verify_s)),
    )
    assert device.host >= {"draft", "verify"}
    assert all(stream.free_s <= time.perf_counter() for stream in device.streams)


def test_both_lanes_run_at_the_same_time_and_are_timed_by_the_device(
    partition: Partition, device: FakeLaneDevice
) -> None:
    """Calls only enqueue work. Caught: the host's times, lanes that take turns."""
    before_s = time.perf_counter()

    def work(seconds: float) -> tuple[float, float]:
        given_s = time.perf_counter()
        device.work(f"{seconds}", seconds)
        return given_s, given_s + seconds

    joined = partition.run_both(lambda _lane, _done: work(0.05), synchronous(lambda _lane: work(0.4)))
    after_s = time.perf_counter()
    assert before_s <= joined.began_s <= min(joined.draft_began_s, joined.verify_began_s)
    assert max(joined.draft_ended_s, joined.verify_ended_s) <= after_s
    assert joined.draft_ended_s - joined.draft_began_s >= 0.0499
    assert joined.verify_ended_s - joined.verify_began_s >= 0.3999
    both_s = min(joined.drafted[1], joined.verified[1]) - max(joined.drafted[0], joined.verified[0])
    assert joined.overlap_s >= both_s - 1e-6
    assert both_s > 0


def test_verification_is_enqueued_first_and_waited_for_after_drafting(
    partition: Partition, device: FakeLaneDevice
) -> None:
    """Caught: waiting before drafting, drafting first, waiting on the caller's stream."""
    order: list[tuple[str, FakeStream]] = []

    def verify(_lane: Lane) -> PendingResult[str]:
        order.append(("enqueued", device.current))
        device.work("verify", 0.002)

        def wait() -> str:
            order.append(("waited for", device.current))
            return "tokens"

        return PendingResult(wait)

    def draft(lane: Lane, _verify_done: Callable[[], bool]) -> FakeStream:
        order.append(("drafted", device.current))
        return stream_of(lane)

    joined = partition.run_both(draft, verify)
    assert joined.verified == "tokens"
    assert [what for what, _ in order] == ["enqueued", "drafted", "waited for"]
    assert order[0][1] is order[2][1]
    assert order[1][1] is joined.drafted is not order[0][1]


@pytest.mark.parametrize("launches_more", [False, True])
def test_work_enqueued_while_waiting_counts_for_verification(
    partition: Partition, device: FakeLaneDevice, launches_more: bool
) -> None:
    """For its time and for the order of later work. Caught: an end that stays where it was, or always moves."""

    def verify(_lane: Lane) -> PendingResult[None]:
        device.work("forward", 0.01)

        def wait() -> None:
            if launches_more:
                device.work("choice", 0.04)

        return PendingResult(wait, launches_more)

    def draft(_lane: Lane, verify_done: Callable[[], bool]) -> float:
        until(verify_done)
        time.sleep(0.02)  # verification is done by then, unless it enqueues more
        return time.perf_counter()

    joined = partition.run_both(draft, verify)
    verify_s = joined.verify_ended_s - joined.verify_began_s
    assert verify_s >= (0.0699 if launches_more else 0.0099)
    assert launches_more == (joined.verify_ended_s > joined.drafted)
    assert not launches_more or device.host >= {"forward", "choice"}
    assert device.default.before >= {"forward"}


def test_verification_is_done_when_the_device_has_done_it(partition: Partition, device: FakeLaneDevice) -> None:
    """Caught: done as soon as it is enqueued, or never."""

    def verify(_lane: Lane) -> float:
        given_s = time.perf_counter()
        device.work("verify", 0.05)
        return given_s + 0.05

    def draft(_lane: Lane, verify_done: Callable[[], bool]) -> float:
        until(verify_done)
        return time.perf_counter()

    for _ in range(2):  # both pairs use the same events
        joined = partition.run_both(draft, synchronous(verify))
        assert joined.drafted >= joined.verified


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_of_one_lane_is_raised_after_the_work_of_both(
    partition: Partition, device: FakeLaneDevice, kind: type[BaseException]
) -> None:
    """Caught: an end that is not recorded when a call raises, a join that is left out then."""

    def fails(name: str) -> None:
        device.work(name, 0.01)
        raise kind("this lane")

    def verifying(name: str, enqueued: bool, waited: bool) -> PendingResult[None]:
        device.work(name, 0.01)
        if not enqueued:
            raise kind("this lane")
        return PendingResult(lambda: None if waited else fails(f"{name}, more"), launches_more=not waited)

    cases = ((False, True, True), (True, True, False), (True, False, True))
    for turn, (drafts, enqueued, waited) in enumerate(cases):
        names = {f"verify {turn}"} | ({f"draft {turn}"} if enqueued else set())
        names |= {f"verify {turn}, more"} if not waited else set()
        with pytest.raises(kind, match="this lane"):
            partition.run_both(
                lambda _lane, _done, turn=turn, drafts=drafts: (  # type: ignore[misc]
                    device.work(f"draft {turn}", 0.01) if drafts else fails(f"draft {turn}")
                ),
                lambda _lane, turn=turn, enqueued=enqueued, waited=waited: verifying(  # type: ignore[misc]
                    f"verify {turn}", enqueued, waited
                ),
            )
        assert device.host >= names
        assert device.default.before >= names
        assert device.current is device.default
    assert partition.run_both(lambda _lane, _done: 1, synchronous(lambda _lane: 2)).verified == 2


def test_nothing_is_drafted_where_enqueueing_verification_fails(partition: Partition) -> None:
    drafting: list[str] = []

    def fail(_lane: Lane) -> PendingResult[None]:
        raise ValueError("out of range")

    with pytest.raises(ValueError, match="out of range"):
        partition.run_both(lambda _lane, _done: drafting.append("began"), fail)
    assert not drafting


def test_of_two_errors_the_verifiers_is_raised_and_the_drafts_noted(partition: Partition) -> None:
    def fail(name: str) -> None:
        raise ValueError(name)

    with pytest.raises(ValueError, match="verify") as caught:
        partition.run_both(lambda _lane, _done: fail("draft"), lambda _lane: PendingResult(lambda: fail("verify")))
    assert "ValueError('draft')" in caught.value.__notes__[0]


@pytest.mark.parametrize("refused", ["record", "hold_stream", "synchronize"])
def test_a_device_that_fails_says_so_and_no_lane_runs_on(
    partition: Partition, device: FakeLaneDevice, refused: str
) -> None:
    """Caught: a thread that still drafts when the error is raised."""
    drafting: list[str] = []

    def draft(_lane: Lane, _done: Callable[[], bool]) -> None:
        drafting.append("began")
        time.sleep(0.01)
        drafting.append("ended")

    device.refuses = refused
    with pytest.raises(RuntimeError, match=f"CUDA error: {refused}"):
        partition.run_both(draft, synchronous(lambda _lane: None))
    assert drafting in ([], ["began", "ended"])
    device.refuses = ""
    assert partition.run_both(lambda _lane, _done: 1, synchronous(lambda _lane: 2)).drafted == 1


def test_the_error_of_a_call_is_raised_even_if_the_join_fails_too(
    partition: Partition, device: FakeLaneDevice
) -> None:
    """Caught: the join's error in its place, which says less."""

    def verify(_lane: Lane) -> None:
        device.refuses = "synchronize"
        raise ValueError("out of range")

    with pytest.raises(ValueError, match="out of range") as caught:
        partition.run_both(lambda _lane, _done: None, synchronous(verify))
    device.refuses = ""
    assert "CUDA error: synchronize" in caught.value.__notes__[0]


def test_runs_make_no_events_streams_or_threads(partition: Partition, device: FakeLaneDevice) -> None:
    partition.run_both(lambda _lane, _done: None, synchronous(lambda _lane: None))
    before = device.num_events, len(device.streams), lane_threads()
    for turn in range(300):
        joined = partition.run_both(lambda _lane, _done, turn=turn: turn, synchronous(lambda _lane: None))  # type: ignore[misc]
        assert joined.drafted == turn
    assert (device.num_events, len(device.streams), lane_threads()) == before


def test_closed_lanes_leave_no_thread_and_run_nothing_more(partition: Partition, device: FakeLaneDevice) -> None:
    """Caught: streams destroyed while the device works."""
    before = lane_threads()
    partition.run_both(lambda _lane, _done: None, synchronous(lambda _lane: None))
    device.work("late", 0.02)
    partition.close()
    partition.close()
    assert lane_threads() == before
    assert "late" in device.host
    with pytest.raises(AssertionError, match="closed"):
        partition.run_both(lambda _lane, _done: None, synchronous(lambda _lane: None))


def test_shares_that_are_not_offered_are_refused_with_those_that_are(partition: Partition) -> None:
    share = partition.share
    assert share in partition.shares()
    with pytest.raises(ConfigError, match=r"share is 0\.37; ") as caught:
        partition.resize(0.37)
    assert str(partition.shares()[0]) in str(caught.value)
    assert partition.share == share


def test_two_streams_both_have_everything_and_short_kernels_come_first() -> None:
    device = FakeLaneDevice()
    joined = plain_streams(device).run_both(lambda lane, _done: lane, synchronous(lambda lane: lane))
    assert joined.drafted.device_lane is not None
    assert joined.verified.device_lane is not None
    assert joined.drafted.device_lane.num_processors == joined.verified.device_lane.num_processors == 132
    assert stream_of(joined.drafted).priority < stream_of(joined.verified).priority == 0
