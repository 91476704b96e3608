"""Lanes: what divides the processors between drafting and verification while both run. The contract, the partition
of a CPU (Cores), and the reference, which divides nothing (Serial); those of a GPU are in streams.py.

Knows nothing of models and backends: a call that runs on a lane receives the lane and hands its processors on.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

from faser.errors import ConfigError
from faser.kernels.interface.shapes import DeviceLane, Processors
from faser.machine import usable_cores

D = TypeVar("D")
T = TypeVar("T")
V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)

_JOIN_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Processors of a call.

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
    """Results of both lanes, and when each was busy, in seconds of time.perf_counter.

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


class LaneCall(Generic[T]):
    """Runs a call once and keeps its outcome.

    cores: the running thread is moved to the first of these; None: it stays where it is.
    began_s, ended_s: seconds of time.perf_counter. error: the exception that the call raised.
    """

    __slots__ = ("_call", "_cores", "_ended", "_value", "began_s", "ended_s", "error")

    def __init__(self, cores: tuple[int, ...] | None, call: Callable[[], T]) -> None:
        self._cores = cores
        self._call = call
        self._value: list[T] = []
        self._ended = threading.Lock()
        self._ended.acquire()
        self.began_s = self.ended_s = 0.0
        self.error: BaseException | None = None

    def run(self) -> None:
        """Keeps every exception instead of raising it: the caller joins the other lane before it raises any."""
        try:
            if self._cores is not None:
                os.sched_setaffinity(0, self._cores[:1])
            self.began_s = time.perf_counter()
            self._value.append(self._call())
        except BaseException as error:
            self.error = error
        finally:
            self.ended_s = time.perf_counter()
            self._ended.release()

    def wait(self) -> None:
        """Block until the call has run; a KeyboardInterrupt during the wait is raised only then."""
        try:
            self._ended.acquire()
        except BaseException:
            self._ended.acquire()
            raise

    @property
    def value(self) -> T:
        return self._value[0]


def raise_first(errors: Mapping[str, BaseException | None]) -> None:
    """Raise the first exception, with a note for each further one. errors: by what raised it; None: it did not."""
    failed = [(name, error) for name, error in errors.items() if error is not None]
    if not failed:
        return
    (_, first), *others = failed
    for name, error in others:
        first.add_note(f"{name} failed too: {error!r}")
    raise first


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


class Cores:
    """Partition of a CPU: the last cores draft, on a thread of their own; the caller verifies on the first ones.

    cores: None: all that this process may use. Raises ConfigError for fewer than two cores, and for cores that
    this process may not use.
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
        self._thread: LaneThread | None = None
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

    def run_both(self, draft: Draft[D], verify: Verify[V]) -> OverlapResult[D, V]:
        assert not self._closed, "lanes were closed"
        began_s = time.perf_counter()
        verify_done = threading.Event()
        draft_lane, verify_lane = self._draft_lane, self._verify_lane
        drafting = LaneCall(draft_lane.cores, lambda: draft(draft_lane, verify_done.is_set))
        verifying = LaneCall(verify_lane.cores, lambda: verify(verify_lane).wait())
        before = os.sched_getaffinity(0)
        self._start(drafting)
        try:
            try:
                verifying.run()
            finally:
                verify_done.set()
                drafting.wait()
        finally:
            os.sched_setaffinity(0, before)
        return overlap_result(drafting, verifying, began_s)

    def close(self) -> None:
        self._closed = True
        if self._thread is not None:
            self._thread.end()
            self._thread = None

    def _start(self, call: LaneCall[T]) -> None:
        """On the one lane thread: made at first use, and made anew in a forked child, which has no copy of it."""
        if self._thread is None or self._thread.owner != os.getpid():
            self._thread = LaneThread()
        self._thread.start(call)


class LaneThread:
    """A thread that runs one call after another. It ends with this object or with the interpreter.

    owner: id of the process that made it.
    """

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        thread = threading.Thread(target=_serve, args=(self._calls,), name="draft-lane", daemon=True)
        thread.start()
        self.end = weakref.finalize(self, _end, self._calls, thread)

    def start(self, call: LaneCall[T]) -> None:
        self._calls.put(call.run)


def draft_widths(num_cores: int) -> tuple[int, ...]:
    """Return the numbers of cores for a draft lane, of at least two: one, a quarter, half; ascending, distinct."""
    return tuple(sorted({1, max(1, num_cores // 4), num_cores // 2}))


def core_numbers(most: int | None = None) -> tuple[int, ...]:
    """Cores that this thread may run on, as many as the process may keep busy, and `most` at most."""
    return tuple(sorted(os.sched_getaffinity(0)))[: usable_cores()][:most]


def _serve(calls: "SimpleQueue[Callable[[], None] | None]") -> None:
    call = calls.get()
    while call is not None:
        call()
        call = None  # the waiting thread keeps no tensors of the last call alive
        call = calls.get()


def _end(calls: "SimpleQueue[Callable[[], None] | None]", thread: threading.Thread) -> None:
    """In a forked child the thread counts as ended."""
    calls.put(None)
    if thread is not threading.current_thread():
        thread.join(_JOIN_TIMEOUT_S)
