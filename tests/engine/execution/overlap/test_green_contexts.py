"""Green contexts: lanes on processors that they do not share, and handles that are always given back.

The driver is a fake that counts its handles. Bugs that these tests have caught are named where they are caught.
"""

import pytest
import torch

from faser.engine.execution.overlap.lanes import make_gpu_partition
from faser.engine.execution.overlap.partition import Lane, synchronous
from faser.engine.execution.overlap.streams import default_verify_counts, green_contexts
from faser.kernels.cuda.lanes import CudaLaneDevice, GreenContextError, Group, open_green_driver
from tests.engine.execution.overlap.processor_probe import MOST_PROCESSORS, count_blocks, processors_of
from tests.kernels.cuda.fake_green_driver import FakeGreenDriver
from tests.kernels.cuda.fake_lane_device import FakeLaneDevice, FakeStream

VERIFY_COUNTS = (120, 112, 96)  # of an H200


class Refusing(FakeGreenDriver):
    """Refuses contexts for groups of this many processors."""

    def __init__(self, refused: int) -> None:
        super().__init__()
        self._refused = refused

    def context(self, group: Group) -> object:
        if group.count == self._refused:
            raise GreenContextError("cuGreenCtxCreate: not permitted")
        return super().context(group)


def stream_of(lane: Lane) -> FakeStream:
    assert lane.device_lane is not None
    assert isinstance(lane.device_lane.stream, FakeStream)
    return lane.device_lane.stream


def test_an_h200_is_divided_in_one_way_and_graphs_are_for_that_one() -> None:
    """Caught: the largest group instead of the preferred one, the other splits made as well."""
    driver = FakeGreenDriver()
    partition, _ = make_gpu_partition("sm", FakeLaneDevice(), lambda: driver)
    assert [round(share * 132) for share in partition.shares()] == [20]
    assert len(driver.contexts) == 2
    partition.close()


@pytest.mark.parametrize("count", VERIFY_COUNTS)
def test_verification_has_the_group_and_drafting_the_rest(count: int) -> None:
    """Only groups promise thread block clusters. Caught: the two swapped, counts of one given for the other."""
    driver, device = FakeGreenDriver(), FakeLaneDevice()
    partition = green_contexts(driver, device, [count])
    groups = {f"at {address}": driver.contexts[context] for address, context in driver.streams.items()}
    joined = partition.run_both(lambda lane, _done: lane, synchronous(lambda lane: lane))
    verify, draft = groups[stream_of(joined.verified).name], groups[stream_of(joined.drafted).name]
    assert verify.resource == tuple(range(count))
    assert draft.resource == tuple(range(count, 132))
    assert joined.verified.device_lane is not None
    assert joined.drafted.device_lane is not None
    assert joined.verified.device_lane.num_processors == count
    assert joined.drafted.device_lane.num_processors == 132 - count
    assert round(partition.share * 132) == 132 - count
    partition.close()


def test_splits_have_the_counts_that_the_driver_gives() -> None:
    """Groups of 64 here. Caught: the requested counts, a split without rest."""

    class Coarse(FakeGreenDriver):
        def split(self, count: int):  # type: ignore[no-untyped-def]
            return super().split(-(-count // 64) * 64)

    partition = green_contexts(Coarse(num_processors=132), FakeLaneDevice(), VERIFY_COUNTS)
    assert [round(share * 132) for share in partition.shares()] == [4]
    partition.close()
    with pytest.raises(GreenContextError, match=r"128 processors cannot be divided: groups of \(120, 112, 96\)"):
        green_contexts(Coarse(num_processors=128), FakeLaneDevice(num_processors=128), VERIFY_COUNTS)


def test_contexts_and_streams_are_given_back_when_closed() -> None:
    """The fake driver checks that streams go before contexts. Caught: contexts kept, the order reversed."""
    driver, device = FakeGreenDriver(), FakeLaneDevice()
    partition = green_contexts(driver, device, VERIFY_COUNTS)
    assert (len(driver.contexts), len(driver.streams), set(driver.priorities)) == (2, 2, {0})
    partition.run_both(lambda _lane, _done: None, synchronous(lambda _lane: None))
    partition.close()
    assert driver.contexts == driver.streams == {}
    partition.close()
    assert driver.log.count("destroy context") == 2


def test_streams_are_destroyed_when_their_work_is_done() -> None:
    """Caught: waiting for the device after its contexts are destroyed."""
    device = FakeLaneDevice()

    class Careful(FakeGreenDriver):
        def destroy_stream(self, stream: int) -> None:
            assert "late" in device.host
            super().destroy_stream(stream)

    partition = green_contexts(Careful(), device, VERIFY_COUNTS)
    with device.on(device.streams[-1]):
        device.work("late", 0.02)
    partition.close()


def test_handles_are_given_back_even_if_the_device_is_broken() -> None:
    class Broken(FakeLaneDevice):
        def wait(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    driver = FakeGreenDriver()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        green_contexts(driver, Broken(), VERIFY_COUNTS).close()
    assert driver.contexts == driver.streams == {}


@pytest.mark.parametrize("num_processors", range(9, 200))
def test_every_device_can_be_divided(num_processors: int) -> None:
    """Verification keeps most of the processors, in groups of 8."""
    for count in default_verify_counts(num_processors):
        partition = green_contexts(
            FakeGreenDriver(num_processors=num_processors), FakeLaneDevice(num_processors=num_processors), [count]
        )
        draft = round(partition.share * num_processors)
        assert (num_processors - draft) % 8 == 0
        assert draft - 8 < num_processors / 4
        partition.close()


def test_a_gpu_that_is_too_small_is_refused() -> None:
    assert default_verify_counts(8) == ()
    with pytest.raises(GreenContextError, match="8 processors cannot be divided"):
        green_contexts(
            FakeGreenDriver(num_processors=8), FakeLaneDevice(num_processors=8), default_verify_counts(8)
        )


def test_the_first_split_that_the_driver_does_not_refuse_is_made() -> None:
    """Caught: a refusal that ends the start, or that leaves a context of the refused split alive."""
    driver = Refusing(VERIFY_COUNTS[0])
    partition = green_contexts(driver, FakeLaneDevice(), VERIFY_COUNTS)
    assert 132 - round(partition.share * 132) == VERIFY_COUNTS[1]
    assert list(partition.refused_splits) == [VERIFY_COUNTS[0]]
    assert len(driver.contexts) == len(driver.streams) == 2
    partition.close()
    assert driver.contexts == driver.streams == {}


@pytest.mark.parametrize("call", range(5))
def test_a_driver_that_refuses_every_split_leaves_nothing_and_streams_are_used_instead(call: int) -> None:
    driver, device = FakeGreenDriver(refuses=call), FakeLaneDevice()
    with pytest.raises(GreenContextError, match="CUDA_ERROR_NOT_SUPPORTED"):
        green_contexts(driver, device, VERIFY_COUNTS)
    assert driver.contexts == driver.streams == {}
    for name in ("sm", "auto"):
        driver = FakeGreenDriver(refuses=call)
        partition, refused = make_gpu_partition(name, device, lambda driver=driver: driver)  # type: ignore[misc]
        assert partition.name == "streams"
        assert refused is not None
        assert refused.endswith("CUDA_ERROR_NOT_SUPPORTED, operation not supported")
        assert driver.contexts == driver.streams == {}
        partition.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("count", VERIFY_COUNTS)
def test_on_a_gpu_each_lane_stays_on_processors_of_its_own(count: int) -> None:
    """Kernels enqueued on a lane's stream, and those of a CUDA graph captured there and replayed on another."""
    gpu = torch.device("cuda", torch.cuda.current_device())
    device = CudaLaneDevice(gpu)
    partition = green_contexts(open_green_driver(gpu), device, [count])

    def probe(lane: Lane) -> tuple[set[int], set[int], int]:
        assert lane.device_lane is not None
        assert isinstance(lane.device_lane.stream, torch.cuda.Stream)
        return (
            processors_of(lane.device_lane.stream),
            replayed(lane.device_lane.stream),
            lane.device_lane.num_processors,
        )

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
        draft, verify = (  # in turns: a capture waits for the device
            partition.run_both(lambda lane, _done: probe(lane), synchronous(lambda _lane: None)).drafted,
            partition.run_both(lambda _lane, _done: None, synchronous(probe)).verified,
        )
        for eager, captured, num_processors in (draft, verify):
            assert len(eager) == num_processors
            assert captured == eager
        assert not draft[0] & verify[0]
        assert draft[2] + verify[2] == device.num_processors
    finally:
        partition.close()
