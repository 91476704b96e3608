"""Recordings of each lane, replayed on streams of a divided device, in the order of its events.

The lanes are those of `sm`, through StreamLanes; its device is a clock that knows what comes behind what
(fake_lane_device), and its driver counts handles. What is recorded and computed is emulated on the CPU as in
test_lane_recordings. Every replay, and every kernel that is given one by one, is a piece of work on the current
stream. Oracle of the tokens: the same lanes and recordings, one lane after the other.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pytest

from faser.engine.execution.cuda_graphs.batch_sizes import GraphSizes
from faser.engine.execution.overlap.gpu_partition import SmGroups
from faser.engine.execution.overlap.partition import Draft, Lane, OverlapResult, PendingResult, Verify
from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
from faser.kernels.cuda.streams import LaneEvent
from faser.kernels.interface.processors import DeviceLane
from tests.engine.execution.cuda_graphs.test_graph_runner import WIDTH, write_heads_of_64
from tests.engine.execution.overlap.test_lane_graphs import (
    NUM_TOKENS,
    SLOTS,
    Pair,
    few_answers,
    overlapping_engine,
    world_on,
)
from tests.kernels.cuda.fake_device import FakeAccelerator, FakeRecorder
from tests.kernels.cuda.fake_graph import fake_backend
from tests.kernels.cuda.fake_green_driver import FakeGreenDriver
from tests.kernels.cuda.fake_lane_device import FakeLaneDevice, FakeLaneEvent

D = TypeVar("D")
T = TypeVar("T")
V = TypeVar("V")

SHARE = 20 / 132  # the only one that is offered here
SIZES = GraphSizes(
    rows=(16,), max_sequences=SLOTS, max_blocks_each=WIDTH
)  # of all steps but those that read prompts


@dataclass
class Streaming(FakeAccelerator):
    """on_launch: called before every kernel that is given by itself, by the thread that gives it."""

    on_launch: Callable[[], None] = lambda: None

    def launch(self, kernel: Callable[[], None]) -> None:
        if self.tape is None:
            self.on_launch()
        super().launch(kernel)


@dataclass(eq=False)
class Witness:
    """See Partition. Groups of a device; holds what must hold of each lane's replays.

    one_by_one: verification is waited for before drafting begins. lane: whose call runs. before: names of all work
    given before the present pair; of_lane: in the pair, by lane. pools: of memory, and which lane replays from
    them in the pair. replays: in all pairs, by lane, and those outside of them as "everything".
    """

    accelerator: Streaming
    device: FakeLaneDevice
    one_by_one: bool = False
    inner: SmGroups = field(init=False)
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
        self.inner = SmGroups(FakeGreenDriver(), self.device, [112])
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

    def both(self, draft: Draft[D], verify: Verify[V]) -> OverlapResult[D, V]:
        assert self.is_asked, "a pair runs on the share of the one before"
        assert self.device.default.before >= self.before
        self.is_asked = False
        self.of_lane = {"draft": set(), "verify": set()}
        self.pools = {}
        self.in_pair = True
        try:
            joined = self.inner.both(
                lambda lane, _until: self._as(lane, lambda: draft(lane, lambda: False)),
                lambda lane: self._giving(lane, verify),
            )
        finally:
            self.in_pair = False
        given = self.of_lane["draft"] | self.of_lane["verify"]
        assert self.device.host >= given, "memory is given back that a lane still uses"
        assert self.device.default.before >= given, "the next step does not come behind both lanes"
        self.before |= given
        return joined

    def close(self) -> None:
        self.inner.close()

    def _giving(self, lane: Lane, verify: Verify[V]) -> PendingResult[V]:
        underway = self._as(lane, lambda: verify(lane))
        if not self.one_by_one:
            return replace(underway, wait=lambda: self._as(lane, underway.wait))
        verified = self._as(lane, underway.wait)
        return PendingResult(lambda: verified)

    def _as(self, lane: Lane, call: Callable[[], T]) -> T:
        assert self.lane is None, "one lane calls within the other's call"
        self.lane = lane.place
        try:
            return call()
        finally:
            self.lane = None

    def _on_replay(self, recorder: FakeRecorder) -> None:
        lane = self.lane
        assert (lane is not None) == self.in_pair, "replayed beside the lanes"
        assert recorder.place == lane, f"recorded for {recorder.place}, replayed on {lane}"
        if lane is not None:
            whose = self.pools.setdefault(id(recorder.pool), lane.name)
            assert whose == lane.name, "both lanes replay recordings that share a pool"
        self.replays["everything" if lane is None else lane.name] += 1
        self._work()

    def _work(self) -> None:
        """Give a piece of work to the current stream, and look at what it comes behind."""
        lane, stream = self.lane, self.device.current
        self.number += 1
        name = f"work {self.number}"
        behind = self.device.work(name)
        assert behind >= self.before, "work does not come behind what was given before its pair"
        if lane is None:
            assert stream is self.device.default, f"work on {stream} while no lane is there"
            self.before.add(name)
            return
        assert stream is lane.stream, f"work of the {lane.name} lane on {stream}"
        other = self.of_lane["verify" if lane.name == "draft" else "draft"]
        assert not behind & other, "a lane comes behind the other one"
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
    beside = backend.concurrent_instance()
    if forgets is not None:
        beside = forgets(backend._accelerator, backend._library, backend._kernels)
    try:
        engine = overlapping_engine(world_on(witness, checkpoints, backend, beside, sizes=SIZES), SHARE)
        found = few_answers(engine)
    finally:
        witness.close()
    stats = engine.stats().speculation
    assert stats is not None
    assert sum(each.accepted for each in stats.methods) > 10
    return found


@pytest.mark.slow
def test_lanes_on_streams_of_their_own_bring_the_tokens_of_one_lane_after_the_other(checkpoints: Pair) -> None:
    """Each lane replays its own recordings on its own stream, behind what came before and not behind the other."""
    in_turn = Witness(Streaming(), FakeLaneDevice(), one_by_one=True)
    at_once = Witness(Streaming(), FakeLaneDevice())

    wanted, found = said(checkpoints, in_turn), said(checkpoints, at_once)

    assert found == wanted
    assert {len(token_ids) for token_ids in found.values()} == {NUM_TOKENS}
    assert at_once.replays == in_turn.replays
    assert at_once.replays["draft"] > 50
    assert at_once.replays["verify"] > 10
    assert at_once.replays["everything"] > 0


class _ForgetsItsLane(FlashInferBackend):
    """Planted: the draft lane replays what was recorded on everything."""

    @property
    def lane(self) -> None:
        return None


@pytest.mark.slow
def test_a_lane_that_replays_what_was_recorded_on_everything_is_caught(checkpoints: Pair) -> None:
    with pytest.raises(AssertionError, match=r"recorded for None, replayed on .*draft"):
        said(checkpoints, Witness(Streaming(), FakeLaneDevice()), _ForgetsItsLane)


class _NeverHolds(FakeLaneEvent):
    """Planted: nothing comes behind it."""

    def hold(self) -> None:
        pass


class _NeverWaits(FakeLaneEvent):
    """Planted: the host goes on at once."""

    def wait(self) -> None:
        pass


@dataclass
class _Careless(FakeLaneDevice):
    kind: type[FakeLaneEvent] = FakeLaneEvent

    def event(self) -> FakeLaneEvent:
        return self.kind(self)

    def elapsed_s(self, _earlier: LaneEvent, _later: LaneEvent) -> float:
        return 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, says", [(_NeverHolds, "given before its pair"), (_NeverWaits, "memory is given back")]
)
def test_lanes_out_of_order_are_caught(checkpoints: Pair, kind: type[FakeLaneEvent], says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        said(checkpoints, Witness(Streaming(), _Careless(kind=kind)))
