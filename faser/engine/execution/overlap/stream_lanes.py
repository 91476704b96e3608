"""Two lanes of a GPU at the same time: one thread gives work to the streams of both.

Owns the events that put the lanes' work in order with everybody else's. Knows nothing of where the streams run.

Giving work takes the host less time than the device, and two threads would take the interpreter from each other at
every call of torch: with a thread each, steps of 64 sequences took 1.18 times as long (benchmarks/host_gap). So
verification, the longer one, is given first, then the draft is made, then verification is waited for.

    caller's stream   … begun ┬─────────────────────────────┬┬ over …
    draft's stream            └ began … drafting … ended ───┘│
    verify's stream           └ began … verifying … ended ───┘

so a lane sees everything that was computed before, and what comes after sees both. The host waits for `over` too:
memory that is given back then is used by neither lane.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from faser.engine.execution.overlap.lane_thread import LaneCall, raise_first
from faser.engine.execution.overlap.partition import Draft, Lane, OverlapResult, PendingResult, Verify
from faser.kernels.cuda.streams import LaneDevice, LaneEvent

D = TypeVar("D")
T = TypeVar("T")
V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePair:
    """The two lanes of a share. Both have a place, and streams of their own."""

    draft: Lane
    verify: Lane


@dataclass(frozen=True, slots=True)
class _Span:
    """Around a lane's work, on its stream."""

    began: LaneEvent
    ended: LaneEvent


class StreamLanes:
    """Runs pairs of calls, one pair at a time. Its events are used again in every pair: no step makes new ones."""

    def __init__(self, device: LaneDevice) -> None:
        self._device = device
        self._begun, self._over = device.event(), device.event()
        self._drafting = _Span(device.event(), device.event())
        self._verifying = _Span(device.event(), device.event())
        self._closed = False

    def both(self, pair: LanePair, draft: Draft[D], verify: Verify[V]) -> OverlapResult[D, V]:
        """See Partition.both. Verification is over when the device has done all that was given to it.

        Times of the lanes are the device's, counted back from when the host saw both end.
        """
        assert not self._closed, "lanes were closed"
        began_s = time.perf_counter()
        giving = LaneCall(None, lambda: self._on(pair.verify, self._verifying, lambda: verify(pair.verify)))
        is_over = self._verifying.ended.is_over
        drafting = LaneCall(None, lambda: self._on(pair.draft, self._drafting, lambda: draft(pair.draft, is_over)))
        verifying = LaneCall(None, lambda: self._finish(pair.verify, giving.value))
        joining = LaneCall(None, self._join)
        self._begun.mark()
        giving.run()
        if giving.error is None:
            drafting.run()
            verifying.run()
        joining.run()
        raise_first(
            {
                "the verify lane": giving.error or verifying.error,
                "the draft lane": drafting.error,
                "what joins them": joining.error,
            }
        )
        return self._joined(drafting.value, verifying.value, began_s, joining.value)

    def close(self) -> None:
        """Wait for everything given to the device."""
        self._closed = True
        self._device.wait()

    def _on(self, lane: Lane, span: _Span, call: Callable[[], T]) -> T:
        """With a lane's stream as the current one, behind what the caller gave before."""
        assert lane.place is not None, lane
        with self._device.on(lane.place.stream):
            self._begun.hold()
            span.began.mark()
            try:
                return call()
            finally:
                span.ended.mark()

    def _finish(self, lane: Lane, underway: PendingResult[V]) -> V:
        """Wait for a lane's result, on its stream again."""
        assert lane.place is not None, lane
        with self._device.on(lane.place.stream):
            try:
                return underway.wait()
            finally:
                if underway.launches_more:
                    self._verifying.ended.mark()

    def _join(self) -> float:
        """Once both calls have returned: the caller's stream comes behind both lanes, and so does the host."""
        self._drafting.ended.hold()
        self._verifying.ended.hold()
        self._over.mark()
        self._over.wait()
        return time.perf_counter()

    def _joined(self, drafted: D, verified: V, began_s: float, over_s: float) -> OverlapResult[D, V]:
        def at_s(event: LaneEvent) -> float:
            return over_s - self._device.elapsed_s(event, self._over)

        return OverlapResult(
            drafted=drafted,
            verified=verified,
            began_s=began_s,
            draft_began_s=at_s(self._drafting.began),
            draft_ended_s=at_s(self._drafting.ended),
            verify_began_s=at_s(self._verifying.began),
            verify_ended_s=at_s(self._verifying.ended),
        )
