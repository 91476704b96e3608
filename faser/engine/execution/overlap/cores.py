"""The partition of a CPU: the last cores draft, on a thread of their own; the first cores verify.

Owns the draft lane's thread and the cores on which both lanes' threads run.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeVar

from faser.engine.execution.overlap.lane_call import LaneCall
from faser.engine.execution.overlap.partition import Draft, Lane, OverlapResult, Verify, overlap_result
from faser.errors import ConfigError
from faser.machine import usable_cores

D = TypeVar("D")
T = TypeVar("T")
V = TypeVar("V")

_JOIN_TIMEOUT_S = 5.0


class Cores:
    """See Partition. The calling thread verifies.

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
    """How many of at least two cores a draft lane may have: one, a quarter, half; ascending and distinct."""
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
