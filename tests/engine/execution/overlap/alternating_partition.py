"""A partition of the emulated device whose lanes alternate: before each replay the other lane runs.

So the lanes interleave as much as possible, in the same way every time, and one thread at a time uses the
emulation. Every replay must be of a CUDA graph that was captured for this lane, from a memory pool that the
other lane does not use in the same run. Drafts get the length that was requested.
"""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from faser.engine.execution.overlap.partition import Draft, Lane, OverlapResult, Verify
from faser.errors import ConfigError
from faser.kernels.interface.shapes import DeviceLane
from tests.kernels.cuda.fake_device import FakeAccelerator, FakeGraphRecorder

D = TypeVar("D")
T = TypeVar("T")
V = TypeVar("V")

_TIMEOUT_S = 60.0


class Baton:
    """Held by one lane at a time, first by the verify lane. pools: the lane that replays from each memory pool."""

    def __init__(self) -> None:
        self._here = threading.local()
        self._turn = threading.Condition()
        self._running: set[str] = set()
        self._holder = ""
        self._pools: dict[int, str] = {}

    def begin(self) -> None:
        """Before a pair of calls, one named "draft" and one named "verify"."""
        self._running, self._holder, self._pools = {"draft", "verify"}, "verify", {}

    def run(self, name: str, lane: Lane, call: Callable[[], T]) -> T:
        """On the lane's thread, while the lane holds the baton."""
        self._wait_for_turn(name)
        self._here.lane = lane.device_lane
        try:
            return call()
        finally:
            self._here.lane = None
            with self._turn:
                self._running.discard(name)
                self._pass_on(name)

    @property
    def lane(self) -> DeviceLane | None:
        """The calling thread's lane; None: it runs on none."""
        found: DeviceLane | None = getattr(self._here, "lane", None)
        return found

    def replays(self, recorder: FakeGraphRecorder) -> None:
        """Called before a replay: returns after the other lane's next step."""
        lane = self.lane
        assert recorder.lane == lane, f"captured for {recorder.lane}, replayed on {lane}"
        if lane is None:
            return
        user = self._pools.setdefault(id(recorder.pool), lane.name)
        assert user == lane.name, "both lanes replay graphs that share a pool"
        with self._turn:
            self._pass_on(lane.name)
        self._wait_for_turn(lane.name)

    def _pass_on(self, name: str) -> None:
        self._holder = next(iter(self._running - {name}), name)
        self._turn.notify_all()

    def _wait_for_turn(self, name: str) -> None:
        with self._turn:
            assert self._turn.wait_for(lambda: self._holder == name, _TIMEOUT_S), f"the {name} lane waits forever"


class AlternatingPartition:
    """See Partition. num_replays: of both lanes together."""

    name = "streams"

    def __init__(self, accelerator: FakeAccelerator, shares: tuple[float, ...] = (0.25, 0.5)) -> None:
        accelerator.on_replay = self._on_replay
        total = accelerator.num_processors
        self._pairs = {
            share: (
                _lane("draft", share, int(share * total)),
                _lane("verify", 1 - share, int((1 - share) * total)),
            )
            for share in shares
        }
        self.share = shares[0]
        self.num_replays = 0
        self._baton = Baton()

    def shares(self) -> tuple[float, ...]:
        return tuple(self._pairs)

    def resize(self, share: float) -> None:
        if share not in self._pairs:
            raise ConfigError(f"share is {share}; it is one of {self.shares()}")
        self.share = share

    def run_both(self, draft: Draft[D], verify: Verify[V]) -> OverlapResult[D, V]:
        draft_lane, verify_lane = self._pairs[self.share]
        self._baton.begin()
        drafted: list[D] = []
        errors: list[BaseException] = []

        def drafting() -> None:
            try:
                drafted.append(self._baton.run("draft", draft_lane, lambda: draft(draft_lane, lambda: False)))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=drafting)
        began_s = time.perf_counter()
        thread.start()
        try:
            verified = self._baton.run("verify", verify_lane, lambda: verify(verify_lane).wait())
        finally:
            thread.join()
        if errors:
            raise errors[0]
        ended_s = time.perf_counter()
        return OverlapResult(
            drafted=drafted[0],
            verified=verified,
            began_s=began_s,
            draft_began_s=began_s,
            draft_ended_s=ended_s,
            verify_began_s=began_s,
            verify_ended_s=ended_s,
        )

    def close(self) -> None:
        pass

    def _on_replay(self, recorder: FakeGraphRecorder) -> None:
        self.num_replays += self._baton.lane is not None
        self._baton.replays(recorder)


def _lane(name: str, share: float, num_processors: int) -> Lane:
    stream = f"stream of {name} at {share}"
    device_lane = DeviceLane(name=name, share=share, num_processors=num_processors, stream=stream)
    return Lane(cores=None, device_lane=device_lane)
