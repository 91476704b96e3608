"""Two lanes of a GPU at the same time, each on a CUDA stream; one host thread enqueues the work of both.

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

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from faser.engine.execution.overlap.partition import (
    Draft,
    Lane,
    LaneCall,
    OverlapResult,
    PendingResult,
    Verify,
    raise_first,
)
from faser.errors import ConfigError
from faser.kernels.cuda.device import DeviceEvent
from faser.kernels.cuda.lanes import GROUP_UNIT, GreenContextError, GreenDriver, Group, LaneDevice, open_stream
from faser.kernels.interface.shapes import DeviceLane

D = TypeVar("D")
T = TypeVar("T")
V = TypeVar("V")

_log = logging.getLogger("faser.engine")

_NOMINAL_SHARE = 0.5  # two plain streams divide nothing: the share is only a name
# Drafting is a chain of small kernels that never fills the device; verification has enough thread blocks to use
# what is left. With the small kernels served first, both lanes end earliest. Green contexts need no priorities:
# their processors are disjoint.
_DRAFT_PRIORITY, _VERIFY_PRIORITY = -1, 0
# The verify lane's part of the processors, as a fraction, the preferred one first; the draft lane has the others.
# A pass of a draft model moves its weights and computes little, and a few processors already move a large part of
# what the whole GPU can: a seventh, an eleventh and a quarter cover draft models of different sizes. Verification
# keeps three quarters or more: it is bound by arithmetic where overlap pays, and slows down with every processor
# that it loses.
_VERIFY_PARTS = ((6, 7), (10, 11), (3, 4))


@dataclass(frozen=True, slots=True)
class _LaneEvents:
    """Before and after a lane's work, on its stream."""

    began: DeviceEvent
    ended: DeviceEvent


class GpuPartition:
    """Partition of a GPU, made by plain_streams or green_contexts; a step makes no events.

    draft, verify: the lanes, each with a stream of its own. made: what destroys them, which is taken over.
    refused_splits: what the driver said of other splits, by processors of the verify lane.
    """

    def __init__(
        self,
        name: str,
        device: LaneDevice,
        draft: DeviceLane,
        verify: DeviceLane,
        made: ExitStack,
        refused_splits: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.name = name
        self.share = draft.share
        self.refused_splits = refused_splits
        self._device = device
        self._draft_lane, self._verify_lane = (Lane(cores=None, device_lane=each) for each in (draft, verify))
        self._fork, self._joined = device.event(), device.event()
        self._drafting = _LaneEvents(device.event(), device.event())
        self._verifying = _LaneEvents(device.event(), device.event())
        self._closed = False
        self._made = made.pop_all()

    def shares(self) -> tuple[float, ...]:
        return (self.share,)

    def resize(self, share: float) -> None:
        if share != self.share:
            raise ConfigError(f"a draft lane's share is {share}; of these lanes it is {self.share}")

    def run_both(self, draft: Draft[D], verify: Verify[V]) -> OverlapResult[D, V]:
        """Verification is done when the device has done all work enqueued for it.

        The lanes' times are the device's, counted back from the moment when the host saw the join.
        """
        assert not self._closed, "lanes were closed"
        began_s = time.perf_counter()
        draft_lane, verify_lane, verify_done = self._draft_lane, self._verify_lane, self._verifying.ended.query
        enqueueing = LaneCall(None, lambda: self._on(verify_lane, self._verifying, lambda: verify(verify_lane)))
        drafting = LaneCall(
            None, lambda: self._on(draft_lane, self._drafting, lambda: draft(draft_lane, verify_done))
        )
        verifying = LaneCall(None, lambda: self._finish(enqueueing.value))
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
        """Wait for everything enqueued on the device. No CUDA graph of a lane may be replayed afterwards."""
        with self._made:
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

    def _finish(self, pending: PendingResult[V]) -> V:
        """Wait for verification's result, with its stream current again."""
        assert self._verify_lane.device_lane is not None
        with self._device.on(self._verify_lane.device_lane.stream):
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


def plain_streams(device: LaneDevice) -> GpuPartition:
    """The partition `streams`: thread blocks of both lanes compete for every processor."""
    share, count = _NOMINAL_SHARE, device.num_processors
    draft, verify = device.stream(_DRAFT_PRIORITY), device.stream(_VERIFY_PRIORITY)
    return GpuPartition(
        "streams",
        device,
        DeviceLane(name="draft", share=share, num_processors=count, stream=draft),
        DeviceLane(name="verify", share=1 - share, num_processors=count, stream=verify),
        ExitStack(),
    )


def green_contexts(driver: GreenDriver, device: LaneDevice, verify_counts: Sequence[int]) -> GpuPartition:
    """The partition `sm`: two groups of processors that share none, each with a CUDA green context.

    Verification has the group of the first split that the driver grants, drafting the processors that it leaves
    over. verify_counts: processors that a verify lane may have, in the order of preference; the driver may round
    up. Raises GreenContextError where it grants none.
    """
    refusals: dict[int, GreenContextError] = {}
    for count in verify_counts:
        with ExitStack() as unfinished:
            try:
                group, rest = driver.split(count)
                if rest.count:
                    share = rest.count / driver.num_processors
                    draft = _green_lane(driver, device, "draft", rest, share, unfinished)
                    verify = _green_lane(driver, device, "verify", group, 1 - share, unfinished)
                    refused = {of: str(refusal) for of, refusal in refusals.items()}
                    return GpuPartition("sm", device, draft, verify, unfinished, refused)
            except GreenContextError as refusal:
                _log.info("lanes with %d processors for verification are left out: %s", count, refusal)
                refusals[count] = refusal
    if refusals:
        raise next(iter(refusals.values()))
    total, counts = driver.num_processors, tuple(verify_counts)
    raise GreenContextError(f"{total} processors cannot be divided: groups of {counts} leave none")


def _green_lane(
    driver: GreenDriver, device: LaneDevice, name: str, group: Group, share: float, made: ExitStack
) -> DeviceLane:
    """made: receives what destroys the lane's context and stream."""
    stream = device.adopt(open_stream(driver, group, made))
    return DeviceLane(name=name, share=share, num_processors=group.count, stream=stream)


def default_verify_counts(num_processors: int) -> tuple[int, ...]:
    """Processors of the verify lane in the splits that `sm` tries, in that order: multiples of 8.

    Of 132: 112, 120, 96, which leave 20, 12, 36 for drafting. Empty for fewer than 9 processors.
    """
    counts = (num_processors * part // whole // GROUP_UNIT * GROUP_UNIT for part, whole in _VERIFY_PARTS)
    return tuple(dict.fromkeys(count for count in counts if count))
