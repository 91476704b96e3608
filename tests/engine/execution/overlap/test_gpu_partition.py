"""Lanes of a GPU: the work of each is on its stream, in order with all other work, and nothing outlives the join.

Without a GPU: the device is a clock that knows what comes behind what (fake_lane_device), the driver counts its
handles (fake_green_driver). Bugs these tests have been seen to catch are named where they are caught.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from benchmarks.gpu.processor_probe import MOST_PROCESSORS, count_blocks, processors_of
from faser.engine.execution.overlap.gpu_partition import SmGroups, Streams, make_gpu_partition
from faser.engine.execution.overlap.gpu_shares import shares_for
from faser.engine.execution.overlap.kept_rates import RatesOf
from faser.engine.execution.overlap.partition import Lane, Partition, PendingResult, at_once
from faser.errors import ConfigError
from faser.kernels.cuda.device_rates import DeviceRates, measure_rates
from faser.kernels.cuda.green_contexts import GreenContextError, GreenDriver, open_green_driver
from faser.kernels.cuda.streams import CudaLaneDevice, LaneDevice
from tests.kernels.cuda.fake_green_driver import FakeGreenDriver
from tests.kernels.cuda.fake_lane_device import FakeLaneDevice, FakeStream
from tests.kernels.cuda.fake_rates import H200, L4, Curve, RatedDevice, linear

PATIENCE_S = 10.0
VERIFY_COUNTS = (120, 112, 96)  # of an H200


@pytest.fixture
def device() -> FakeLaneDevice:
    return FakeLaneDevice()


def known(curve: Curve) -> RatesOf:
    """Rates that nobody has to measure."""
    return lambda _driver, _device: curve.rates()


@pytest.fixture(params=["streams", "sm"])
def partition(request: pytest.FixtureRequest, device: FakeLaneDevice) -> Iterator[Partition]:
    """Either in turn."""
    partition, refused = make_gpu_partition(request.param, device, FakeGreenDriver, known(H200))
    assert refused is None
    assert partition.name == request.param
    yield partition
    partition.close()


def stream_of(lane: Lane) -> FakeStream:
    assert lane.place is not None
    assert isinstance(lane.place.stream, FakeStream)
    return lane.place.stream


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
        joined = partition.both(lambda lane, _done: where(lane), at_once(where))
        (draft_lane, on_draft, draft_thread), (verify_lane, on_verify, verify_thread) = (
            joined.drafted,
            joined.verified,
        )
        assert (on_draft, on_verify) == (stream_of(draft_lane), stream_of(verify_lane))
        assert len({on_draft, on_verify, device.default}) == 3
        assert verify_thread == draft_thread == threading.get_ident()
        assert device.current is device.default
        assert draft_lane.place is not None
        assert verify_lane.place is not None
        assert (draft_lane.place.name, verify_lane.place.name) == ("draft", "verify")
        assert draft_lane.place.share == share == partition.share
        assert verify_lane.place.share == pytest.approx(1 - share)
        assert draft_lane.cores is verify_lane.cores is None


def test_a_share_always_has_the_same_streams(partition: Partition) -> None:
    """What was recorded on one is replayed beside it. Caught: streams made when lanes are resized."""
    found: dict[float, set[tuple[FakeStream, FakeStream]]] = {}
    for _ in range(3):
        for share in partition.shares():
            partition.resize(share)
            joined = partition.both(lambda lane, _done: stream_of(lane), at_once(stream_of))
            found.setdefault(share, set()).add((joined.drafted, joined.verified))
    assert all(len(each) == 1 for each in found.values())
    assert len({stream for each in found.values() for pair in each for stream in pair}) == 2 * len(found)


def test_lanes_come_behind_what_was_given_before_and_not_behind_each_other(
    partition: Partition, device: FakeLaneDevice
) -> None:
    """Caught: a lane that does not wait for the caller's stream; the lanes in a row."""
    device.work("inputs", 0.005)
    verify = at_once(lambda _lane: device.work("verify"))
    joined = partition.both(lambda _lane, _done: device.work("draft"), verify)
    assert joined.drafted == joined.verified == {"inputs"}


def test_what_is_given_after_a_join_comes_behind_both_lanes(partition: Partition, device: FakeLaneDevice) -> None:
    """Caught: a caller's stream that waits for one lane only, events that are taken for marked too early."""
    expected = {"before"}
    device.work("before")
    for turn in range(5):
        seen = partition.both(
            lambda _lane, _done, turn=turn: device.work(f"draft {turn}", 0.001),  # type: ignore[misc]
            at_once(lambda _lane, turn=turn: device.work(f"verify {turn}", 0.001)),  # type: ignore[misc]
        )
        assert expected <= seen.drafted
        assert expected <= seen.verified
        expected |= {f"draft {turn}", f"verify {turn}"}
        assert device.work(f"after {turn}") >= expected


@pytest.mark.parametrize("draft_s, verify_s", [(0.03, 0.0), (0.0, 0.03), (0.02, 0.02)])
def test_what_a_lane_used_may_be_freed_after_the_join(
    partition: Partition, device: FakeLaneDevice, draft_s: float, verify_s: float
) -> None:
    """Calls that return while the device still works. Caught: a host that waits for no lane, or for one."""
    partition.both(
        lambda _lane, _done: device.work("draft", draft_s),
        at_once(lambda _lane: device.work("verify", verify_s)),
    )
    assert device.host >= {"draft", "verify"}
    assert all(stream.free_s <= time.perf_counter() for stream in device.streams)


def test_both_lanes_run_at_the_same_time_and_are_timed_by_the_device(
    partition: Partition, device: FakeLaneDevice
) -> None:
    """Calls that only give work, as launches do. Caught: the host's times, lanes that take turns."""
    before_s = time.perf_counter()

    def work(seconds: float) -> tuple[float, float]:
        given_s = time.perf_counter()
        device.work(f"{seconds}", seconds)
        return given_s, given_s + seconds

    joined = partition.both(lambda _lane, _done: work(0.05), at_once(lambda _lane: work(0.08)))
    after_s = time.perf_counter()
    assert before_s <= joined.began_s <= min(joined.draft_began_s, joined.verify_began_s)
    assert max(joined.draft_ended_s, joined.verify_ended_s) <= after_s
    assert joined.draft_ended_s - joined.draft_began_s >= 0.0499
    assert joined.verify_ended_s - joined.verify_began_s >= 0.0799
    both_s = min(joined.drafted[1], joined.verified[1]) - max(joined.drafted[0], joined.verified[0])
    assert joined.overlap_s >= both_s - 1e-6
    assert both_s > 0


def test_verification_is_given_first_and_waited_for_when_the_draft_is_made(
    partition: Partition, device: FakeLaneDevice
) -> None:
    """Caught: waiting before drafting, drafting first, waiting on the caller's stream."""
    order: list[tuple[str, FakeStream]] = []

    def verify(_lane: Lane) -> PendingResult[str]:
        order.append(("given", device.current))
        device.work("verify", 0.002)

        def wait() -> str:
            order.append(("waited for", device.current))
            return "tokens"

        return PendingResult(wait)

    def draft(lane: Lane, _is_over: Callable[[], bool]) -> FakeStream:
        order.append(("drafted", device.current))
        return stream_of(lane)

    joined = partition.both(draft, verify)
    assert joined.verified == "tokens"
    assert [what for what, _ in order] == ["given", "drafted", "waited for"]
    assert order[0][1] is order[2][1]
    assert order[1][1] is joined.drafted is not order[0][1]


@pytest.mark.parametrize("launches_more", [False, True])
def test_what_is_given_while_waiting_counts_for_verification(
    partition: Partition, device: FakeLaneDevice, launches_more: bool
) -> None:
    """Its time, and the order of what comes behind. Caught: an end that stays where it was, or always moves."""

    def verify(_lane: Lane) -> PendingResult[None]:
        device.work("forward", 0.01)

        def wait() -> None:
            if launches_more:
                device.work("choice", 0.04)

        return PendingResult(wait, launches_more)

    def draft(_lane: Lane, is_over: Callable[[], bool]) -> None:
        ends_s = time.perf_counter() + PATIENCE_S
        while not is_over() and time.perf_counter() < ends_s:
            time.sleep(0.0005)
        time.sleep(0.02)  # verification is over by then; only what is given later comes behind

    joined = partition.both(draft, verify)
    verify_s = joined.verify_ended_s - joined.verify_began_s
    assert verify_s >= 0.0699 if launches_more else 0.0099 <= verify_s < 0.03
    assert not launches_more or device.host >= {"forward", "choice"}
    assert device.default.before >= {"forward"}


def test_verification_is_over_when_the_device_has_done_it(partition: Partition, device: FakeLaneDevice) -> None:
    """Caught: over as soon as it has been given, or never."""

    def verify(_lane: Lane) -> float:
        device.work("verify", 0.05)
        return time.perf_counter() + 0.05

    def draft(_lane: Lane, is_over: Callable[[], bool]) -> tuple[bool, float]:
        first = is_over()
        ends_s = time.perf_counter() + PATIENCE_S
        while not is_over() and time.perf_counter() < ends_s:
            time.sleep(0.0005)
        return first, time.perf_counter()

    for _ in range(2):  # the events are those of the pair before
        joined = partition.both(draft, at_once(verify))
        assert joined.drafted[0] is False
        assert joined.verified - 0.01 <= joined.drafted[1] < joined.verified + PATIENCE_S - 1


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_of_one_lane_waits_for_what_both_gave(
    partition: Partition, device: FakeLaneDevice, kind: type[BaseException]
) -> None:
    """Caught: an end that is not marked when a call raises, a join that is left out then."""

    def fails(name: str) -> None:
        device.work(name, 0.01)
        raise kind("this lane")

    def verifying(name: str, given: bool, waited: bool) -> PendingResult[None]:
        device.work(name, 0.01)
        if not given:
            raise kind("this lane")
        return PendingResult(lambda: None if waited else fails(f"{name}, more"), launches_more=not waited)

    cases = ((False, True, True), (True, True, False), (True, False, True))
    for turn, (drafts, given, waited) in enumerate(cases):
        names = {f"verify {turn}"} | ({f"draft {turn}"} if given else set())
        names |= {f"verify {turn}, more"} if not waited else set()
        with pytest.raises(kind, match="this lane"):
            partition.both(
                lambda _lane, _done, turn=turn, drafts=drafts: (  # type: ignore[misc]
                    device.work(f"draft {turn}", 0.01) if drafts else fails(f"draft {turn}")
                ),
                lambda _lane, turn=turn, given=given, waited=waited: verifying(  # type: ignore[misc]
                    f"verify {turn}", given, waited
                ),
            )
        assert device.host >= names
        assert device.default.before >= names
        assert device.current is device.default
    assert partition.both(lambda _lane, _done: 1, at_once(lambda _lane: 2)).verified == 2


def test_where_verification_cannot_be_given_nothing_is_drafted(partition: Partition) -> None:
    drafting: list[str] = []

    def fail(_lane: Lane) -> PendingResult[None]:
        raise ValueError("out of range")

    with pytest.raises(ValueError, match="out of range"):
        partition.both(lambda _lane, _done: drafting.append("began"), fail)
    assert not drafting


def test_of_two_errors_the_verifiers_is_raised_and_the_drafts_noted(partition: Partition) -> None:
    def fail(name: str) -> None:
        raise ValueError(name)

    with pytest.raises(ValueError, match="verify") as caught:
        partition.both(lambda _lane, _done: fail("draft"), lambda _lane: PendingResult(lambda: fail("verify")))
    assert "ValueError('draft')" in caught.value.__notes__[0]


@pytest.mark.parametrize("refused", ["mark", "hold", "wait"])
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
        partition.both(draft, at_once(lambda _lane: None))
    assert drafting in ([], ["began", "ended"])
    device.refuses = ""
    assert partition.both(lambda _lane, _done: 1, at_once(lambda _lane: 2)).drafted == 1


def test_what_a_call_raised_is_told_even_if_the_join_fails_too(
    partition: Partition, device: FakeLaneDevice
) -> None:
    """Caught: the join's error in its place, which says less."""

    def verify(_lane: Lane) -> None:
        device.refuses = "wait"
        raise ValueError("out of range")

    with pytest.raises(ValueError, match="out of range") as caught:
        partition.both(lambda _lane, _done: None, at_once(verify))
    device.refuses = ""
    assert "CUDA error: wait" in caught.value.__notes__[0]


def test_co_runs_make_no_events_streams_or_threads(partition: Partition, device: FakeLaneDevice) -> None:
    partition.both(lambda _lane, _done: None, at_once(lambda _lane: None))
    before = device.num_events, len(device.streams), lane_threads()
    for turn in range(300):
        assert partition.both(lambda _lane, _done, turn=turn: turn, at_once(lambda _lane: None)).drafted == turn  # type: ignore[misc]
    assert (device.num_events, len(device.streams), lane_threads()) == before


def test_closed_lanes_leave_no_thread_and_run_nothing_more(partition: Partition, device: FakeLaneDevice) -> None:
    """Caught: streams destroyed while the device works."""
    before = lane_threads()
    partition.both(lambda _lane, _done: None, at_once(lambda _lane: None))
    device.work("late", 0.02)
    partition.close()
    partition.close()
    assert lane_threads() == before
    assert "late" in device.host
    with pytest.raises(AssertionError, match="closed"):
        partition.both(lambda _lane, _done: None, at_once(lambda _lane: None))


def test_shares_that_are_not_offered_are_refused_with_those_that_are(partition: Partition) -> None:
    share = partition.share
    assert share in partition.shares()
    with pytest.raises(ConfigError, match=r"share is 0\.37; ") as caught:
        partition.resize(0.37)
    assert str(partition.shares()[0]) in str(caught.value)
    assert partition.share == share


def test_an_h200_is_divided_in_three_ways() -> None:
    """Where its processors do what is expected of them. Caught: counts of the draft lane given for the other's."""
    partition, _ = make_gpu_partition("sm", FakeLaneDevice(), FakeGreenDriver, known(H200))
    assert [round(share * 132) for share in partition.shares()] == [12, 20, 36]
    assert partition.share == partition.shares()[0]
    found = []
    for share in partition.shares():
        partition.resize(share)
        joined = partition.both(lambda lane, _done: lane.place, at_once(lambda lane: lane.place))
        assert joined.drafted is not None
        assert joined.verified is not None
        found.append((joined.verified.num_processors, joined.drafted.num_processors))
    assert found == [(120, 12), (112, 20), (96, 36)]
    partition.close()


def test_verification_has_the_group_and_drafting_the_rest() -> None:
    """Only groups promise clusters. Caught: the two swapped."""
    driver, device = FakeGreenDriver(), FakeLaneDevice()
    partition = SmGroups(driver, device, VERIFY_COUNTS)
    groups = {f"at {address}": driver.contexts[context] for address, context in driver.streams.items()}
    for share in partition.shares():
        partition.resize(share)
        joined = partition.both(lambda lane, _done: lane, at_once(lambda lane: lane))
        verify, draft = groups[stream_of(joined.verified).name], groups[stream_of(joined.drafted).name]
        assert verify.count % 8 == 0
        assert verify.resource == tuple(range(verify.count))
        assert draft.resource == tuple(range(verify.count, 132))
        assert joined.verified.place is not None
        assert joined.verified.place.num_processors == verify.count
    partition.close()


@pytest.mark.parametrize("num_processors", range(9, 200))
def test_every_device_is_divided_by_its_rates(num_processors: int) -> None:
    """Caught: shares that are not ascending, groups other than those that were measured."""
    rates = linear(num_processors).rates()
    driver, device = FakeGreenDriver(num_processors=num_processors), FakeLaneDevice(num_processors=num_processors)
    partition, refused = make_gpu_partition("sm", device, lambda: driver, lambda _driver, _device: rates)
    shares = partition.shares()
    assert refused is None
    assert 1 <= len(shares) <= 3
    assert list(shares) == sorted(shares)
    assert [round(share * num_processors) for share in shares] == [each.draft for each in shares_for(rates)]
    assert all((num_processors - round(share * num_processors)) % 8 == 0 for share in shares)
    partition.close()


def test_what_a_driver_makes_of_groups_is_offered() -> None:
    """Groups of 64 here: two of three requests become one. Caught: counts that were asked for, a rest of nothing."""

    class Coarse(FakeGreenDriver):
        def split(self, count: int):  # type: ignore[no-untyped-def]
            return super().split(-(-count // 64) * 64)

    partition = SmGroups(Coarse(num_processors=132), FakeLaneDevice(), VERIFY_COUNTS)
    assert [round(share * 132) for share in partition.shares()] == [4]
    partition.close()
    with pytest.raises(GreenContextError, match=r"128 processors cannot be divided: groups of \(120, 112, 96\)"):
        SmGroups(Coarse(num_processors=128), FakeLaneDevice(num_processors=128), VERIFY_COUNTS)


def test_contexts_and_streams_are_given_back_when_closed() -> None:
    """The driver's fake holds that streams go first. Caught: contexts kept, the order reversed."""
    driver, device = FakeGreenDriver(), FakeLaneDevice()
    partition = SmGroups(driver, device, VERIFY_COUNTS)
    assert (len(driver.contexts), len(driver.streams), set(driver.priorities)) == (6, 6, {0})
    partition.both(lambda _lane, _done: None, at_once(lambda _lane: None))
    partition.close()
    assert driver.contexts == driver.streams == {}
    partition.close()
    assert driver.log.count("destroy context") == 6


def test_streams_are_destroyed_when_nobody_works_on_them() -> None:
    """Caught: waiting for the device when its contexts are gone."""
    device = FakeLaneDevice()

    class Careful(FakeGreenDriver):
        def destroy_stream(self, stream: int) -> None:
            assert "late" in device.host
            super().destroy_stream(stream)

    partition = SmGroups(Careful(), device, VERIFY_COUNTS)
    with device.on(device.streams[-1]):
        device.work("late", 0.02)
    partition.close()


def test_handles_are_given_back_even_if_the_device_is_broken() -> None:
    class Broken(FakeLaneDevice):
        def wait(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    driver = FakeGreenDriver()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        SmGroups(driver, Broken(), VERIFY_COUNTS).close()
    assert driver.contexts == driver.streams == {}


@pytest.mark.parametrize("call", range(15))
def test_a_refusal_at_any_call_leaves_nothing_and_streams_are_used_instead(call: int) -> None:
    """15 calls make three pairs. Caught: handles of a half-made partition that stay."""
    driver, device = FakeGreenDriver(refuses=call), FakeLaneDevice()
    with pytest.raises(GreenContextError, match="CUDA_ERROR_NOT_SUPPORTED"):
        SmGroups(driver, device, VERIFY_COUNTS)
    assert driver.contexts == driver.streams == {}
    for name in ("sm", "auto"):
        driver = FakeGreenDriver(refuses=call)
        partition, refused = make_gpu_partition(name, device, lambda driver=driver: driver, known(H200))  # type: ignore[misc]
        assert partition.name == "streams"
        assert refused is not None
        assert refused.endswith("CUDA_ERROR_NOT_SUPPORTED, operation not supported")
        assert driver.contexts == driver.streams == {}
        partition.close()


def test_a_driver_that_cannot_be_opened_is_a_refusal_too() -> None:
    """Caught: rates of a device that cannot be divided."""

    def missing() -> GreenDriver:
        raise GreenContextError("dividing a GPU takes the package cuda-bindings")

    def unwanted(_driver: GreenDriver, _device: LaneDevice) -> DeviceRates:
        raise AssertionError("nothing can be measured")

    partition, refused = make_gpu_partition("sm", FakeLaneDevice(), missing, unwanted)
    assert (partition.name, refused) == ("streams", "dividing a GPU takes the package cuda-bindings")


@pytest.mark.parametrize("name", ["sm", "auto"])
def test_a_gpu_whose_rates_cannot_be_measured_has_streams_and_says_why(name: str) -> None:
    """Caught: shares of a device that nobody knows; an error that ends the start."""
    rated = RatedDevice(H200)
    rated.fails = 100

    def rates(_driver: GreenDriver, _device: LaneDevice) -> DeviceRates:
        return measure_rates(rated.driver, rated, rated.opened(), lambda *_: None)

    partition, refused = make_gpu_partition(name, FakeLaneDevice(), lambda: rated.driver, rates)
    assert partition.name == "streams"
    assert refused == "measuring the GPU's processors: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"
    assert rated.driver.contexts == rated.driver.streams == {}
    partition.close()


def test_a_gpu_is_divided_by_what_was_measured_on_it_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """From the device's clock to the lanes. Caught: contexts that stay, shares told to nobody."""
    rated, device = RatedDevice(L4, FakeGreenDriver(num_processors=58)), FakeLaneDevice(num_processors=58)

    def rates(driver: GreenDriver, asked: LaneDevice) -> DeviceRates:
        assert (driver, asked) == (rated.driver, device)
        return measure_rates(driver, rated, rated.opened(), lambda *_: None)

    with caplog.at_level(logging.INFO, logger="faser.engine"):
        partition, refused = make_gpu_partition("sm", device, lambda: rated.driver, rates)
    assert refused is None
    assert [round(share * 58) for share in partition.shares()] == [2, 10]
    assert len(rated.driver.contexts) == len(rated.driver.streams) == 4
    (line,) = [each.getMessage() for each in caplog.records]
    assert line.startswith(
        "lanes may have draft 2 of 58 processors, 36 of 260 GB/s, verify 56, 68 of 70 TFLOP/s; "
    )
    partition.close()
    assert rated.driver.contexts == rated.driver.streams == {}


def test_two_streams_both_have_everything_and_short_kernels_come_first() -> None:
    device = FakeLaneDevice()
    joined = Streams(device).both(lambda lane, _done: lane, at_once(lambda lane: lane))
    assert joined.drafted.place is not None
    assert joined.verified.place is not None
    assert joined.drafted.place.num_processors == joined.verified.place.num_processors == 132
    assert stream_of(joined.drafted).priority < stream_of(joined.verified).priority == 0


def test_the_factory_knows_what_divides_a_gpu_and_refuses_the_others_by_name() -> None:
    def unwanted() -> GreenDriver:
        raise AssertionError("nobody asked for groups")

    device = FakeLaneDevice()
    assert make_gpu_partition("auto", device, FakeGreenDriver, known(H200))[0].name == "sm"
    for name in ("serial", "streams"):
        partition, refused = make_gpu_partition(name, device, unwanted, known(H200))
        assert (partition.name, refused) == (name, None)
    with pytest.raises(ConfigError, match="partition cores divides a CPU"):
        make_gpu_partition("cores", device, unwanted, known(H200))
    with pytest.raises(ConfigError, match="partition is halves; on a GPU it must be auto, sm, streams or serial"):
        make_gpu_partition("halves", device, unwanted, known(H200))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_each_lane_stays_on_processors_of_its_own() -> None:
    """Kernels given to a lane's stream, and those recorded there and replayed on another."""
    gpu = torch.device("cuda", torch.cuda.current_device())
    device = CudaLaneDevice(gpu)
    partition = SmGroups(open_green_driver(gpu), device, VERIFY_COUNTS)

    def probe(lane: Lane) -> tuple[set[int], set[int], int]:
        assert lane.place is not None
        assert isinstance(lane.place.stream, torch.cuda.Stream)
        return processors_of(lane.place.stream), replayed(lane.place.stream), lane.place.num_processors

    def replayed(stream: torch.cuda.Stream) -> set[int]:
        counts = torch.zeros(MOST_PROCESSORS, dtype=torch.int32, device=gpu)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            count_blocks(counts, device.num_processors)
        other = torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]
        other.wait_stream(stream)
        with torch.cuda.stream(other):
            graph.replay()
            return set(counts.nonzero().flatten().tolist())

    try:
        for share in partition.shares():
            partition.resize(share)
            draft, verify = (  # one after the other: recordings wait for the device
                partition.both(lambda lane, _done: probe(lane), at_once(lambda _lane: None)).drafted,
                partition.both(lambda _lane, _done: None, at_once(probe)).verified,
            )
            for eager, recorded, num_processors in (draft, verify):
                assert len(eager) == num_processors
                assert recorded == eager
            assert not draft[0] & verify[0]
            assert draft[2] + verify[2] == device.num_processors
    finally:
        partition.close()
