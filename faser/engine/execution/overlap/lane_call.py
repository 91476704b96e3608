"""One call on a lane: its value or its exception, and when it ran."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


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
