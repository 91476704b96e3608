"""The thread of a lane, and a call on it: when it ran, and what became of it.

Owns the thread and how it ends. Knows nothing of what is divided between lanes.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

_LEAVE_S = 5.0  # for the thread to end


class LaneCall(Generic[T]):
    """A call, on which cores its thread is meanwhile (None: where it was), and what became of it.

    began_s, ended_s: as time.perf_counter counts. error: what it raised.
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
        """Never raises: whoever waits for the other lane first must not lose this one's error, or its own."""
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
        """Until it has run; an interrupt is raised only then."""
        try:
            self._ended.acquire()
        except BaseException:
            self._ended.acquire()
            raise

    @property
    def value(self) -> T:
        return self._value[0]


class LaneThread:
    """A thread that runs calls given to it. owner: its process. It ends with this object or the interpreter."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        thread = threading.Thread(target=_serve, args=(self._calls,), name="draft-lane", daemon=True)
        thread.start()
        self.end = weakref.finalize(self, _end, self._calls, thread)

    def start(self, call: LaneCall[T]) -> None:
        self._calls.put(call.run)


class LaneThreads:
    """The one thread that there is at a time: made at first use, and again in a forked child, where it is not."""

    def __init__(self) -> None:
        self._thread: LaneThread | None = None

    def start(self, call: LaneCall[T]) -> None:
        if self._thread is None or self._thread.owner != os.getpid():
            self._thread = LaneThread()
        self._thread.start(call)

    def end(self) -> None:
        if self._thread is not None:
            self._thread.end()
            self._thread = None


def raise_first(errors: Mapping[str, BaseException | None]) -> None:
    """What the first that failed raised, with notes about the others; by what failed. None: it did not."""
    failed = [(name, error) for name, error in errors.items() if error is not None]
    if not failed:
        return
    (_, first), *others = failed
    for name, error in others:
        first.add_note(f"{name} failed too: {error!r}")
    raise first


def _serve(calls: "SimpleQueue[Callable[[], None] | None]") -> None:
    call = calls.get()
    while call is not None:
        call()
        call = None  # while this thread waits it holds nobody's tensors
        call = calls.get()


def _end(calls: "SimpleQueue[Callable[[], None] | None]", thread: threading.Thread) -> None:
    """In a forked child the thread counts as ended."""
    calls.put(None)
    if thread is not threading.current_thread():
        thread.join(_LEAVE_S)
