"""CUDA graphs of each lane, replayed on the streams of a divided device, in the order of its events.

The lanes are those of `sm`; the device is a clock that knows which work runs after which (fake_lane_device), and
the driver counts handles. Capture and kernels are emulated on the CPU as in test_lane_graphs. Every replay, and
every kernel outside of a graph, is a piece of work on the current stream. Oracle of the tokens: the same lanes and
graphs, one lane after the other.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pytest

from faser.engine.execution.overlap.partition import Draft, Lane, OverlapResult, PendingResult, Verify
from faser.engine.execution.overlap.streams import GpuPartition, green_contexts
from faser.engine.execution.runner.graph_sizes import GraphSizes
from faser.kernels.cuda.device import DeviceEvent
from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
from faser.kernels.interface.shapes import DeviceLane
from tests.engine.execution.overlap.test_lane_graphs import (
    NUM_TOKENS,
    SLOTS,
    Pair,
    few_answers,
    overlapping_engine,
    world_on,
)
from tests.engine.execution.runner.test_graph_runner import WIDTH, write_heads_of_64
from tests.kernels.cuda.fake_device import FakeAccelerator, FakeGraphRecorder
from tests.kernels.cuda.fake_graph import fake_backend
from tests.kernels.cuda.fake_green_driver import FakeGreenDriver
from tests.kernels.cuda.fake_lane_device import FakeLaneDevice, FakeTimedEvent

D = TypeVar("D")
T = TypeVar("T")
V = TypeVar("V")

SHARE = 20 / 132  # the only one offered here
SIZES = GraphSizes(
    rows=(16,), max_sequences=SLOTS, max_blocks_each=WIDTH
)  # of all steps but those that read prompts


@dataclass
class Streaming(FakeAccelerator):
    """on_launch: called before every kernel outside of a graph, on the thread that launches it."""

    on_launch: Callable[[], None] = lambda: None

    def launch(self, kernel: Callable[[], None]) -> None:
        if self.tape is None:
            self.on_launch()
        super().launch(kernel)


@dataclass(eq=False)
class Witness:
    """See Partition. Checks stream, order and memory pool of every replay on its lanes.

    one_by_one: wait for verification before drafting. lane: the lane whose call runs. before: names of all work
    enqueued before the current pair of calls; of_lane: within the pair, by lane. pools: the lane that replays from
    each memory pool within the pair. replays: number by lane in all pairs; "everything": outside of pairs.
    """

    accelerator: Streaming
    device: FakeLaneDevice
    one_by_one: bool = False
    inner: GpuPartition = field(init=False)
    lane: DeviceLane | None = None
    pools: dict[int, str] = field(default_factory=dict)
    is_asked: bool = False
    in_pair: bool = False
    number: int = 0
    before: set[str] = field(default_factory=set)
    of_lane: dict[str, set[str]] = field(default_factory=dict)
    replays: Counter[str] = field(default_factory=Counter)

    name = "sm"

    def __post_init__(self) -> None:
        self.inner = green_contexts(FakeGreenDriver(), self.device, [112])
        self.accelerator.on_replay = self._on_replay
        self.accelerator.on_launch = self._work

    @property
    def share(self) -> float:
        return self.inner.share

    def shares(self) -> tuple[float, ...]:
        return self.inner.shares()

    def resize(self, share: float) -> None:
        self.inner.resize(share)
        self.is_asked = True

    def run_both(self, draft: Draft[D], verify: Verify[V]) -> OverlapResult[D, V]:
        assert self.is_asked, "a pair runs on the share of the one before"
        assert self.device.default.before >= self.before
        self.is_asked = False
        self.of_lane = {"draft": set(), "verify": set()}
        self.pools = {}
        self.in_pair = True
        try:
            joined = self.inner.run_both(
                lambda lane, _until: self._as(lane, lambda: draft(lane, lambda: False)),
                lambda lane: self._giving(lane, verify),
            )
        finally:
            self.in_pair = False
        enqueued = self.of_lane["draft"] | self.of_lane["verify"]
        assert self.device.host >= enqueued, "memory is freed that a lane still uses"
        assert self.device.default.before >= enqueued, "the next step does not wait for both lanes"
        self.before |= enqueued
        return joined

    def close(self) -> None:
        self.inner.close()

    def _giving(self, lane: Lane, verify: Verify[V]) -> PendingResult[V]:
        pending = self._as(lane, lambda: verify(lane))
        if not self.one_by_one:
            return replace(pending, wait=lambda: self._as(lane, pending.wait))
        verified = self._as(lane, pending.wait)
        return PendingResult(lambda: verified)

    def _as(self, lane: Lane, call: Callable[[], T]) -> T:
        assert self.lane is None, "one lane calls within the other's call"
        self.lane = lane.device_lane
        try:
            return call()
        finally:
            self.lane = None

    def _on_replay(self, recorder: FakeGraphRecorder) -> None:
        lane = self.lane
        assert (lane is not None) == self.in_pair, "replayed outside of the lanes"
        assert recorder.lane == lane, f"captured for {recorder.lane}, replayed on {lane}"
        if lane is not None:
            whose = self.pools.setdefault(id(recorder.pool), lane.name)
            assert whose == lane.name, "both lanes replay graphs that share a pool"
        self.replays["everything" if lane is None else lane.name] += 1
        self._work()

    def _work(self) -> None:
        """Enqueue a piece of work on the current stream, and check what it waits for."""
        lane, stream = self.lane, self.device.current
        self.number += 1
        name = f"work {self.number}"
        earlier = self.device.work(name)
        assert earlier >= self.before, "work does not wait for what was enqueued before its pair"
        if lane is None:
            assert stream is self.device.default, f"work on {stream} outside of the lanes"
            self.before.add(name)
            return
        assert stream is lane.stream, f"work of the {lane.name} lane on {stream}"
        other = self.of_lane["verify" if lane.name == "draft" else "draft"]
        assert not earlier & other, "a lane waits for the other one"
        self.of_lane[lane.name].add(name)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(
        target=write_heads_of_64(tmp_path_factory.mktemp("target")),
        drafter=write_heads_of_64(tmp_path_factory.mktemp("drafter"), noise=0.01),
    )


def said(
    checkpoints: Pair, witness: Witness, forgets: type[FlashInferBackend] | None = None
) -> dict[str, list[int]]:
    """Answers of a new engine over the witness. forgets: what the draft model's backend is instead."""
    backend = fake_backend(witness.accelerator)
    draft_backend = backend.concurrent_instance()
    if forgets is not None:
        draft_backend = forgets(backend._accelerator, backend._library, backend._kernels)
    try:
        engine = overlapping_engine(world_on(witness, checkpoints, backend, draft_backend, sizes=SIZES), SHARE)
        found = few_answers(engine)
    finally:
        witness.close()
    stats = engine.stats().speculation
    assert stats is not None
    assert sum(each.accepted for each in stats.methods) > 10
    return found


@pytest.mark.slow
def test_overlapped_lanes_bring_the_tokens_of_one_lane_after_the_other(checkpoints: Pair) -> None:
    """Each lane replays its own graphs on its own stream, after earlier work and not after the other lane."""
    in_turn = Witness(Streaming(), FakeLaneDevice(), one_by_one=True)
    synchronous_x = Witness(Streaming(), FakeLaneDevice())

    wanted, found = said(checkpoints, in_turn), said(checkpoints, synchronous_x)

    assert found == wanted
    assert {len(token_ids) for token_ids in found.values()} == {NUM_TOKENS}
    assert synchronous_x.replays == in_turn.replays
    assert synchronous_x.replays["draft"] > 50
    assert synchronous_x.replays["verify"] > 10
    assert synchronous_x.replays["everything"] > 0


class _ForgetsItsLane(FlashInferBackend):
    """Planted: the draft lane replays graphs captured for the whole device."""

    @property
    def lane(self) -> None:
        return None


@pytest.mark.slow
def test_a_lane_that_replays_graphs_of_the_whole_device_is_caught(checkpoints: Pair) -> None:
    with pytest.raises(AssertionError, match=r"captured for None, replayed on .*draft"):
        said(checkpoints, Witness(Streaming(), FakeLaneDevice()), _ForgetsItsLane)


class _NeverHolds(FakeTimedEvent):
    """Planted: no stream waits for it."""

    def hold_stream(self) -> None:
        pass


class _NeverWaits(FakeTimedEvent):
    """Planted: the host does not wait for it."""

    def synchronize(self) -> None:
        pass


@dataclass
class _Careless(FakeLaneDevice):
    kind: type[FakeTimedEvent] = FakeTimedEvent

    def event(self) -> FakeTimedEvent:
        return self.kind(self)

    def elapsed_s(self, _earlier: DeviceEvent, _later: DeviceEvent) -> float:
        return 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, says", [(_NeverHolds, "enqueued before its pair"), (_NeverWaits, "memory is freed")]
)
def test_lanes_out_of_order_are_caught(checkpoints: Pair, kind: type[FakeTimedEvent], says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        said(checkpoints, Witness(Streaming(), _Careless(kind=kind)))
