"""Two lanes of a GPU at the same time, each on a CUDA stream; one host thread enqueues the work of both.

Owns the CUDA events that order the lanes' work with all other work. `Streams` is the partition whose lanes share
all processors; green_contexts.py runs its lanes with the same `StreamLanes`.

Enqueueing takes the host less time than computing takes the device, and two threads would take the interpreter
from each other at every call of torch: with a thread each, steps of 64 sequences took 1.18 times as long
(benchmarks/speed/host_gap.py). So verification, the longer one, is enqueued first, then the draft is made, then
the host waits for verification.

    caller's stream   … fork ─┬─────────────────────────────┬┬ joined …
    draft's stream            └ began … drafting … ended ───┘│
    verify's stream           └ began … verifying … ended ───┘

Each lane sees everything that was computed before the fork, and work after the join sees both lanes. The host
waits for `joined` too: memory that is freed afterwards is in use by neither lane.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from faser.engine.execution.overlap.lane_call import LaneCall, raise_first
from faser.engine.execution.overlap.partition import Draft, Lane, OverlapResult, PendingResult, Verify
from faser.errors import ConfigError
from faser.kernels.cuda.events import DeviceEvent
from faser.kernels.cuda.streams import LaneDevice
from faser.kernels.interface.processors import DeviceLane

D = TypeVar("D")
T = TypeVar("T")
V = TypeVar("V")

_NOMINAL_SHARE = 0.5  # two plain streams divide nothing: the share is only a name
# Drafting is a chain of small kernels that never fills the device; verification has enough thread blocks to use
# what is left. With the small kernels served first, both lanes end earliest. Green contexts need no priorities:
# their processors are disjoint.
_DRAFT_PRIORITY, _VERIFY_PRIORITY = -1, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePair:
    """The two lanes of a share. Each has a device lane with a stream of its own."""

    draft: Lane
    verify: Lane


@dataclass(frozen=True, slots=True)
class _LaneEvents:
    """Before and after a lane's work, on its stream."""

    began: DeviceEvent
    ended: DeviceEvent


class StreamLanes:
    """Runs pairs of calls, one pair at a time. All pairs use the same events: a step makes none."""

    def __init__(self, device: LaneDevice) -> None:
        self._device = device
        self._fork, self._joined = device.event(), device.event()
        self._drafting = _LaneEvents(device.event(), device.event())
        self._verifying = _LaneEvents(device.event(), device.event())
        self._closed = False

    def run_both(self, pair: LanePair, draft: Draft[D], verify: Verify[V]) -> OverlapResult[D, V]:
        """See Partition.run_both. Verification is done when the device has done all work enqueued for it.

        The lanes' times are the device's, counted back from the moment when the host saw the join.
        """
        assert not self._closed, "lanes were closed"
        began_s = time.perf_counter()
        enqueueing = LaneCall(None, lambda: self._on(pair.verify, self._verifying, lambda: verify(pair.verify)))
        verify_done = self._verifying.ended.query
        drafting = LaneCall(
            None, lambda: self._on(pair.draft, self._drafting, lambda: draft(pair.draft, verify_done))
        )
        verifying = LaneCall(None, lambda: self._finish(pair.verify, enqueueing.value))
        joining = LaneCall(None, self._join)
        self._fork.record()
        enqueueing.run()
        if enqueueing.error is None:
            drafting.run()
            verifying.run()
        joining.run()
        raise_first(
            {
                "the verify lane": enqueueing.error or verifying.error,
                "the draft lane": drafting.error,
                "the join": joining.error,
            }
        )
        return self._result(drafting.value, verifying.value, began_s, joining.value)

    def close(self) -> None:
        """Wait for everything enqueued on the device."""
        self._closed = True
        self._device.wait()

    def _on(self, lane: Lane, events: _LaneEvents, call: Callable[[], T]) -> T:
        """Call with the lane's stream as the current one, after everything the caller enqueued before."""
        assert lane.device_lane is not None, lane
        with self._device.on(lane.device_lane.stream):
            self._fork.hold_stream()
            events.began.record()
            try:
                return call()
            finally:
                events.ended.record()

    def _finish(self, lane: Lane, pending: PendingResult[V]) -> V:
        """Wait for verification's result, with its stream current again."""
        assert lane.device_lane is not None, lane
        with self._device.on(lane.device_lane.stream):
            try:
                return pending.wait()
            finally:
                if pending.launches_more:
                    self._verifying.ended.record()

    def _join(self) -> float:
        """After both calls returned: the caller's stream waits for both lanes, and the host does. When it did."""
        self._drafting.ended.hold_stream()
        self._verifying.ended.hold_stream()
        self._joined.record()
        self._joined.synchronize()
        return time.perf_counter()

    def _result(self, drafted: D, verified: V, began_s: float, joined_s: float) -> OverlapResult[D, V]:
        def at_s(event: DeviceEvent) -> float:
            return joined_s - self._device.elapsed_s(event, self._joined)

        return OverlapResult(
            drafted=drafted,
            verified=verified,
            began_s=began_s,
            draft_began_s=at_s(self._drafting.began),
            draft_ended_s=at_s(self._drafting.ended),
            verify_began_s=at_s(self._verifying.began),
            verify_ended_s=at_s(self._verifying.ended),
        )


class Streams:
    """See Partition. Two plain streams: thread blocks of both lanes compete for every processor."""

    name = "streams"
    share = _NOMINAL_SHARE

    def __init__(self, device: LaneDevice) -> None:
        self._lanes = StreamLanes(device)
        self._pair = LanePair(
            draft=gpu_lane("draft", self.share, device.num_processors, device.stream(_DRAFT_PRIORITY)),
            verify=gpu_lane("verify", 1 - self.share, device.num_processors, device.stream(_VERIFY_PRIORITY)),
        )

    def shares(self) -> tuple[float, ...]:
        return (self.share,)

    def resize(self, share: float) -> None:
        if share != self.share:
            raise ConfigError(f"a draft lane's share is {share}; of two streams it is {self.share} by name")

    def run_both(self, draft: Draft[D], verify: Verify[V]) -> OverlapResult[D, V]:
        return self._lanes.run_both(self._pair, draft, verify)

    def close(self) -> None:
        self._lanes.close()


def gpu_lane(name: str, share: float, num_processors: int, stream: object) -> Lane:
    device_lane = DeviceLane(name=name, share=share, num_processors=num_processors, stream=stream)
    return Lane(cores=None, device_lane=device_lane)
