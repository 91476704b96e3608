"""Lanes, and the contract of what divides processors between them: a draft lane and a verify lane.

Knows nothing of models and backends: a call that runs on a lane receives the lane and hands its processors on.
One file for each implementation: cores.py (CPU), streams.py and green_contexts.py (GPU); Serial is the reference.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from faser.engine.execution.overlap.lane_call import LaneCall, raise_first
from faser.errors import ConfigError
from faser.kernels.interface.shapes import DeviceLane, Processors

D = TypeVar("D")
V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Where a call runs.

    cores: CPU cores for the backend; the call's own thread runs on the first of them. None: all cores.
    device_lane: part of a GPU, whose stream is the thread's current stream during the call. None: the whole GPU,
    on whichever stream is current.
    """

    cores: tuple[int, ...] | None
    device_lane: DeviceLane | None = None

    @property
    def processors(self) -> Processors | None:
        """The argument of Backend.use; None: all processors."""
        return self.cores if self.device_lane is None else self.device_lane


EVERYTHING = Lane(cores=None)


@dataclass(frozen=True, slots=True)
class PendingResult(Generic[V_co]):
    """The result of work that has been enqueued on a device.

    wait: returns the result once it is on the host; may enqueue further work first.
    launches_more: whether wait may do so.
    """

    wait: Callable[[], V_co]
    launches_more: bool = False


Draft = Callable[[Lane, Callable[[], bool]], D]  # the second argument answers: is verification done?
Verify = Callable[[Lane], PendingResult[V]]


def synchronous(call: Callable[[Lane], V]) -> Verify[V]:
    """A Verify that computes its result before it returns, and waits for nothing."""

    def verify(lane: Lane) -> PendingResult[V]:
        value = call(lane)
        return PendingResult(lambda: value)

    return verify


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapResult(Generic[D, V]):
    """What both lanes returned, and when each was busy, in seconds of time.perf_counter.

    began_s: start of `run_both`; from then to draft_began_s the draft was on its way to its lane.
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
        """Seconds during which both lanes were busy."""
        began_s = max(self.draft_began_s, self.verify_began_s)
        return max(0.0, min(self.draft_ended_s, self.verify_ended_s) - began_s)


class Partition(Protocol):
    """Divides the processors between two lanes. One thread uses it at a time."""

    @property
    def name(self) -> str: ...

    @property
    def share(self) -> float:
        """The draft lane's part of the processors, 0 to 1; 0 where it has none of its own."""
        ...

    def shares(self) -> tuple[float, ...]:
        """The shares that `resize` accepts, ascending, three at most; empty where lanes run in turns."""
        ...

    def resize(self, share: float) -> None:
        """Give the draft lane this share from now on. Raises ConfigError for a share not in shares()."""
        ...

    def run_both(self, draft: Draft[D], verify: Verify[V]) -> OverlapResult[D, V]:
        """Run both calls, verify on the calling thread; return when both are done.

        On a device that computes asynchronously, verification is enqueued first, then the draft is made, and only
        then does the host wait for verification.

        An exception of either call is raised once both are done; of two, verify's is raised, with a note about the
        draft's. The calling thread runs on the verify lane's cores meanwhile, and afterwards where it ran before.
        """
        ...

    def close(self) -> None:
        """End the lanes' threads and give up their streams. Only `close` may be called afterwards."""
        ...


class Serial:
    """Both calls in turns on all processors, the draft first: for a single core, and as the oracle of tests."""

    name = "serial"
    share = 0.0

    def shares(self) -> tuple[float, ...]:
        return ()

    def resize(self, share: float) -> None:
        raise ConfigError(f"a serial partition has no share of {share} to give: its lanes take turns")

    def run_both(self, draft: Draft[D], verify: Verify[V]) -> OverlapResult[D, V]:
        began_s = time.perf_counter()
        drafting = LaneCall(None, lambda: draft(EVERYTHING, lambda: False))
        drafting.run()
        verifying = LaneCall(None, lambda: verify(EVERYTHING).wait())
        verifying.run()
        return overlap_result(drafting, verifying, began_s)

    def close(self) -> None:
        pass


def overlap_result(drafting: LaneCall[D], verifying: LaneCall[V], began_s: float) -> OverlapResult[D, V]:
    """The result of two calls that have run; raises what they raised."""
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
