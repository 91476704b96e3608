"""A GPU with streams for lanes that is a clock: work takes the time that the test says, and computes nothing.

Every piece of work knows the work that is guaranteed to run before it: earlier work of its stream, and what that
stream waited for. The host knows the same of what it waited for. So a missing order is found even where things
happen in the right order by chance.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from faser.kernels.cuda.device import DeviceEvent


@dataclass(eq=False)
class FakeStream:
    """before: names of the work that all later work waits for. free_s: when all its work is done."""

    name: str
    priority: int = 0
    before: frozenset[str] = frozenset()
    free_s: float = 0.0


@dataclass(eq=False)
class FakeTimedEvent:
    owner: "FakeLaneDevice"
    before: frozenset[str] = frozenset()
    at_s: float = 0.0
    is_recorded: bool = False

    def record(self) -> None:
        self.owner.check("record")
        stream = self.owner.current
        self.before = stream.before
        self.at_s = max(stream.free_s, time.perf_counter())
        self.is_recorded = True

    def hold_stream(self) -> None:
        self.owner.check("hold_stream")
        stream = self.owner.current
        stream.before |= self.before
        stream.free_s = max(stream.free_s, self.at_s)

    def query(self) -> bool:
        return time.perf_counter() >= self.at_s

    def synchronize(self) -> None:
        self.owner.check("synchronize")
        time.sleep(max(0.0, self.at_s - time.perf_counter()))
        self.owner.host |= self.before


@dataclass
class FakeLaneDevice:
    """See LaneDevice. host: work that the host knows to be done.

    refuses: the method of events that raises: record, hold_stream or synchronize.
    """

    num_processors: int = 132
    host: frozenset[str] = frozenset()
    refuses: str = ""
    default: FakeStream = field(default_factory=lambda: FakeStream("default"))
    streams: list[FakeStream] = field(default_factory=list)
    num_events: int = 0
    _current: threading.local = field(default_factory=threading.local)

    @property
    def current(self) -> FakeStream:
        """The calling thread's current stream."""
        found = getattr(self._current, "stream", self.default)
        assert isinstance(found, FakeStream)
        return found

    def stream(self, priority: int) -> FakeStream:
        self.streams.append(FakeStream(f"plain {len(self.streams)}", priority))
        return self.streams[-1]

    def adopt(self, address: int) -> FakeStream:
        self.streams.append(FakeStream(f"at {address}"))
        return self.streams[-1]

    @contextmanager
    def on(self, stream: object) -> Iterator[None]:
        assert isinstance(stream, FakeStream)
        before = self.current
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def event(self) -> FakeTimedEvent:
        self.num_events += 1
        return FakeTimedEvent(self)

    def elapsed_s(self, earlier: DeviceEvent, later: DeviceEvent) -> float:
        for each in (earlier, later):
            assert isinstance(each, FakeTimedEvent)
            assert each.is_recorded, "torch raises for an event that was never recorded"
            assert each.query(), "torch raises for an event that has not been passed"
        assert isinstance(earlier, FakeTimedEvent)
        assert isinstance(later, FakeTimedEvent)
        return later.at_s - earlier.at_s

    def wait(self) -> None:
        for stream in (self.default, *self.streams):
            time.sleep(max(0.0, stream.free_s - time.perf_counter()))
            self.host |= stream.before

    def work(self, name: str, seconds: float = 0.0) -> frozenset[str]:
        """Enqueue it on the calling thread's current stream. Returns the work that it waits for."""
        stream = self.current
        before = stream.before
        stream.before |= {name}
        stream.free_s = max(stream.free_s, time.perf_counter()) + seconds
        return before

    def check(self, what: str) -> None:
        if what == self.refuses:
            raise RuntimeError(f"CUDA error: {what}")
