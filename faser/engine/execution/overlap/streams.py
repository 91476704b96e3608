"""Two lanes of a GPU at the same time, each on a CUDA stream; one host thread enqueues the work of both.

Owns the CUDA events that order the lanes' work with all other work. `Streams` is the partition whose lanes share
all processors; green_contexts.py runs its lanes with the same `StreamLanes`.

Enqueueing takes the host less time than computing takes the device, and two threads would take the interpreter
from each other at every call of torch: with a thread each, steps of 64 sequences took 1.18 times as long
(benchmarks/host_gap). So verification, the longer one, is enqueued first, then the draft is made, then the host
waits for verification.

    caller's stream   … fork ─┬─────────────────────────────┬┬ joined …
    draft's stream            └ began … drafting … ended ───┘│
    verify's stream           └ began … verifying … ended ───┘

Each lane sees everything that was computed before the fork, and work after the join sees both lanes. The host
waits for `joined` too: memory that is freed afterwards is in use by neither lane.

The partition `sm`: a GPU's processors in two groups that share none, each with a CUDA green context.

Owns the contexts and streams of all splits.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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
from faser.kernels.cuda.events import DeviceEvent
from faser.kernels.cuda.green_contexts import GROUP_UNIT, GreenContextError, GreenDriver, Group, open_stream
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


_log = logging.getLogger("faser.engine")

# The verify lane's part of the processors, as a fraction, the preferred one first; the draft lane has the others.
# A pass of a draft model moves its weights and computes little, and a few processors already move a large part of
# what the whole GPU can: a seventh, an eleventh and a quarter cover draft models of different sizes. Verification
# keeps three quarters or more: it is bound by arithmetic where overlap pays, and slows down with every processor
# that it loses.
_VERIFY_PARTS = ((6, 7), (10, 11), (3, 4))
# Every split takes a set of CUDA graphs for each lane, and measurements at the start. No split has been measured
# on a GPU, so there is one; more are worth their graphs once figures say which.
MOST_SPLITS = 1


class GreenContexts:
    """See Partition. Verification has the group of each split, drafting the processors that the split left over.

    All splits, contexts and streams are made here and live until `close`. Lanes change their groups between two
    calls of `run_both`, when neither lane has work. A CUDA graph captured on a lane must not be replayed after
    `close`.

    verify_counts: processors that a verify lane may have, in the order of preference; the driver may round up. A
    split that the driver refuses is left out; the first most_splits that it grants are made. Raises
    GreenContextError where it grants none.
    """

    name = "sm"

    def __init__(
        self,
        driver: GreenDriver,
        device: LaneDevice,
        verify_counts: Sequence[int],
        *,
        most_splits: int = MOST_SPLITS,
    ) -> None:
        self._driver = driver
        self._device = device
        self._made = ExitStack()
        self.refused_splits: dict[int, str] = {}  # processors of the verify lane, and the driver's words
        with ExitStack() as unfinished:
            self._pairs = self._make_pairs(verify_counts, most_splits, unfinished)
            self._lanes = StreamLanes(device)
            self._made = unfinished.pop_all()
        self.resize(self.shares()[0])

    @property
    def share(self) -> float:
        return self._share

    def shares(self) -> tuple[float, ...]:
        return tuple(self._pairs)

    def resize(self, share: float) -> None:
        pair = self._pairs.get(share)
        if pair is None:
            raise ConfigError(f"a draft lane's share is {share}; of this GPU it is one of {self.shares()}")
        self._share, self._pair = share, pair

    def run_both(self, draft: Draft[D], verify: Verify[V]) -> OverlapResult[D, V]:
        return self._lanes.run_both(self._pair, draft, verify)

    def close(self) -> None:
        with self._made:
            self._lanes.close()

    def _make_pairs(
        self, verify_counts: Sequence[int], most_splits: int, made: ExitStack
    ) -> dict[float, LanePair]:
        """By the draft lane's share, ascending. made: receives what destroys the contexts and streams."""
        pairs: dict[float, LanePair] = {}
        refusals: list[GreenContextError] = []
        for count in verify_counts:
            if len(pairs) == most_splits:
                break
            try:
                group, rest = self._driver.split(count)
                share = rest.count / self._driver.num_processors
                if rest.count and share not in pairs:
                    pairs[share] = self._make_pair(group, rest, share, made)
            except GreenContextError as refusal:
                _log.info("lanes with %d processors for verification are left out: %s", count, refusal)
                refusals.append(refusal)
                self.refused_splits[count] = str(refusal)
        if not pairs and refusals:
            raise refusals[0]
        if not pairs:
            total, counts = self._driver.num_processors, tuple(verify_counts)
            raise GreenContextError(f"{total} processors cannot be divided: groups of {counts} leave none")
        return dict(sorted(pairs.items()))

    def _make_pair(self, group: Group, rest: Group, share: float, made: ExitStack) -> LanePair:
        with ExitStack() as unfinished:
            pair = LanePair(
                draft=gpu_lane("draft", share, rest.count, self._stream(rest, unfinished)),
                verify=gpu_lane("verify", 1 - share, group.count, self._stream(group, unfinished)),
            )
            made.push(unfinished.pop_all())
        return pair

    def _stream(self, group: Group, made: ExitStack) -> object:
        return self._device.adopt(open_stream(self._driver, group, made))


def default_verify_counts(num_processors: int) -> tuple[int, ...]:
    """Processors of the verify lane in the splits that `sm` tries, in that order: multiples of 8.

    Of 132: 112, 120, 96, which leave 20, 12, 36 for drafting. Empty for fewer than 9 processors.
    """
    counts = (num_processors * part // whole // GROUP_UNIT * GROUP_UNIT for part, whole in _VERIFY_PARTS)
    return tuple(dict.fromkeys(count for count in counts if count))
