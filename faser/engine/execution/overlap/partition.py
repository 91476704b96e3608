"""Lanes: drafting and verification at the same time, each on processors of its own.

Owns on which cores both lanes' threads are, and when each lane began and ended. Knows nothing of models and
backends: what runs on a lane learns the lane's cores and hands them on. What divides a GPU is in gpu_partition.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from faser.engine.execution.overlap.lane_thread import LaneCall, LaneThreads, raise_first
from faser.errors import ConfigError
from faser.kernels.interface.processors import DeviceLane as DeviceLane
from faser.kernels.interface.processors import Processors
from faser.machine import usable_cores

D = TypeVar("D")
V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Where a call runs. cores: what its backend is to use; its thread is on the first. None: everything.

    place: the part of a GPU, whose stream is the calling thread's current one meanwhile. None: all of it, on
    whichever stream is current.
    """

    cores: tuple[int, ...] | None
    place: DeviceLane | None = None

    @property
    def processors(self) -> Processors | None:
        """As a backend is told; None: all, wherever."""
        return self.cores if self.place is None else self.place


EVERYTHING = Lane(cores=None)


@dataclass(frozen=True, slots=True)
class PendingResult(Generic[V_co]):
    """Work that was given to a device. wait: until its result is on the host; may give more work before that.

    launches_more: whether waiting may give more work.
    """

    wait: Callable[[], V_co]
    launches_more: bool = False


Draft = Callable[[Lane, Callable[[], bool]], D]  # the second argument: whether verification is over
Verify = Callable[[Lane], PendingResult[V]]


def at_once(call: Callable[[Lane], V]) -> Verify[V]:
    """Verification that has been done when it has been given: its result is what the call returns."""

    def given(lane: Lane) -> PendingResult[V]:
        value = call(lane)
        return PendingResult(lambda: value)

    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapResult(Generic[D, V]):
    """What both lanes returned, and when they were busy, as time.perf_counter counts seconds.

    began_s: when `both` was called; until draft_began_s the draft was on its way to its lane.
    """

    drafted: D
    verified: V
    began_s: float
    draft_began_s: float
    draft_ended_s: float
    verify_began_s: float
    verify_ended_s: float

    @property
    def overlap_s(self) -> float:
        """How long both lanes were busy at once."""
        began_s = max(self.draft_began_s, self.verify_began_s)
        return max(0.0, min(self.draft_ended_s, self.verify_ended_s) - began_s)


class Partition(Protocol):
    """Divides the processors between two lanes. Used by one thread at a time."""

    @property
    def name(self) -> str: ...

    @property
    def share(self) -> float:
        """Of the processors, what the draft lane has; 0 where it has none of its own."""
        ...

    def shares(self) -> tuple[float, ...]:
        """Which shares may be chosen, ascending, at most three; none where nothing runs at the same time."""
        ...

    def resize(self, share: float) -> None:
        """Give the draft lane this share from now on. Raises ConfigError unless it is one of shares()."""
        ...

    def both(self, draft: Draft[D], verify: Verify[V]) -> OverlapResult[D, V]:
        """Run both, verify on the calling thread; return when both are done.

        Where a device works beside the host, verification is given to it first, then the draft is made, and only
        then is verification waited for.

        What either raises is raised here, but only then; where both do, verify's, with a note about the draft's.
        The calling thread is on the verify lane's cores meanwhile, and then where it was before.
        """
        ...

    def close(self) -> None:
        """End the lane's thread. Afterwards nothing but `close` may be called."""
        ...


class Serial:
    """One after the other on everything, the draft first: for one core, and as the oracle of the others."""

    name = "serial"
    share = 0.0

    def shares(self) -> tuple[float, ...]:
        return ()

    def resize(self, share: float) -> None:
        raise ConfigError(f"a serial partition has no share of {share} to give: its lanes take turns")

    def both(self, draft: Draft[D], verify: Verify[V]) -> OverlapResult[D, V]:
        began_s = time.perf_counter()
        drafting = LaneCall(None, lambda: draft(EVERYTHING, lambda: False))
        drafting.run()
        verifying = LaneCall(None, lambda: verify(EVERYTHING).wait())
        verifying.run()
        return _join(drafting, verifying, began_s)

    def close(self) -> None:
        pass


class Cores:
    """CPU cores: the last ones draft, on a thread made for it; the first ones verify, on the caller's thread.

    cores: None: all that this process may use. Raises ConfigError for fewer than two, and for others than those.
    """

    name = "cores"

    def __init__(self, cores: Sequence[int] | None = None) -> None:
        self._cores = core_numbers() if cores is None else tuple(cores)
        if len(set(self._cores)) < 2:
            raise ConfigError(
                "drafting and verifying on cores of their own takes at least 2 usable cores; "
                f"there is {len(self._cores)}: {list(self._cores)}"
            )
        if not os.sched_getaffinity(0).issuperset(self._cores):
            usable = sorted(os.sched_getaffinity(0))
            raise ConfigError(f"lanes cannot have the cores {list(self._cores)}: this process may use {usable}")
        self._widths = {width / len(self._cores): width for width in draft_widths(len(self._cores))}
        self._threads = LaneThreads()
        self._closed = False
        self.resize(self.shares()[0])

    @property
    def share(self) -> float:
        return self._share

    def shares(self) -> tuple[float, ...]:
        return tuple(self._widths)

    def resize(self, share: float) -> None:
        width = self._widths.get(share)
        if width is None:
            raise ConfigError(f"a draft lane's share is {share}; on these cores it is one of {self.shares()}")
        self._share = share
        self._draft_lane, self._verify_lane = Lane(cores=self._cores[-width:]), Lane(cores=self._cores[:-width])

    def both(self, draft: Draft[D], verify: Verify[V]) -> OverlapResult[D, V]:
        assert not self._closed, "lanes were closed"
        began_s = time.perf_counter()
        verify_done = threading.Event()
        draft_lane, verify_lane = self._draft_lane, self._verify_lane
        drafting = LaneCall(draft_lane.cores, lambda: draft(draft_lane, verify_done.is_set))
        verifying = LaneCall(verify_lane.cores, lambda: verify(verify_lane).wait())
        before = os.sched_getaffinity(0)
        self._threads.start(drafting)
        try:
            try:
                verifying.run()
            finally:
                verify_done.set()
                drafting.wait()
        finally:
            os.sched_setaffinity(0, before)
        return _join(drafting, verifying, began_s)

    def close(self) -> None:
        self._closed = True
        self._threads.end()


def draft_widths(num_cores: int) -> tuple[int, ...]:
    """How many of at least two cores a draft lane may have: one, a quarter, half; ascending and distinct."""
    return tuple(sorted({1, max(1, num_cores // 4), num_cores // 2}))


def core_numbers(most: int | None = None) -> tuple[int, ...]:
    """Cores that this thread may be on, as many as the process may keep busy, and at most `most`."""
    return tuple(sorted(os.sched_getaffinity(0)))[: usable_cores()][:most]


def make_partition(name: str, cores: Sequence[int] | None = None) -> Partition:
    """On a CPU: serial, cores, or auto: cores where there are two. cores: None: all that this process may use.

    Raises ConfigError for what a GPU divides, for a name that is not known, and for fewer than two cores.
    """
    found = core_numbers() if cores is None else tuple(cores)
    match name:
        case "serial":
            return Serial()
        case "cores":
            return Cores(found)
        case "auto":
            return Cores(found) if len(found) > 1 else Serial()
        case "streams" | "sm":
            raise ConfigError(f"partition {name} divides a GPU; device is cpu: choose auto, cores or serial")
        case _:
            raise ConfigError(f"partition is {name}; it must be auto, serial or cores")


def _join(drafting: LaneCall[D], verifying: LaneCall[V], began_s: float) -> OverlapResult[D, V]:
    """Both have run."""
    raise_first({"the verify lane": verifying.error, "the draft lane": drafting.error})
    return OverlapResult(
        drafted=drafting.value,
        verified=verifying.value,
        began_s=began_s,
        draft_began_s=drafting.began_s,
        draft_ended_s=drafting.ended_s,
        verify_began_s=verifying.began_s,
        verify_ended_s=verifying.ended_s,
    )
