"""GPUs whose processors move and compute as fast as a curve says, and one that is a clock of its own.

The curves are made up, from what such devices are said to do; nothing here was measured.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from faser.kernels.cuda.device_rates import DeviceRates, SplitRates
from faser.kernels.cuda.streams import LaneEvent
from tests.kernels.cuda.fake_green_driver import FakeGreenDriver


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """bytes_each, operations_each: a second, of one processor. bytes_most: of any number of them."""

    num_processors: int
    bytes_each: float
    bytes_most: float
    operations_each: float

    def bytes_per_s(self, count: int) -> float:
        return min(count * self.bytes_each, self.bytes_most)

    def operations_per_s(self, count: int) -> float:
        return count * self.operations_each

    def rates(self, unit: int = 8) -> DeviceRates:
        """What measuring should find on a device that makes groups of multiples of unit."""
        total = self.num_processors
        splits = [
            SplitRates(
                verify=count,
                draft=total - count,
                operations_per_s=self.operations_per_s(count),
                bytes_per_s=self.bytes_per_s(total - count),
            )
            for count in reversed(range(unit, total, unit))
        ]
        return DeviceRates(
            num_processors=total,
            operations_per_s=self.operations_per_s(total),
            bytes_per_s=self.bytes_per_s(total),
            splits=tuple(splits),
        )


H200 = Curve(num_processors=132, bytes_each=62.5e9, bytes_most=4.3e12, operations_each=780e12 / 132)
A100 = Curve(num_processors=108, bytes_each=25e9, bytes_most=1.7e12, operations_each=260e12 / 108)
L4 = Curve(num_processors=58, bytes_each=18e9, bytes_most=0.26e12, operations_each=70e12 / 58)


def linear(num_processors: int) -> Curve:
    """Twice as many do twice as much."""
    return Curve(num_processors=num_processors, bytes_each=1e9, bytes_most=1e15, operations_each=1e12)


@dataclass(eq=False)
class RatedStream:
    """count: its processors. free_s: when the device has done all that was given."""

    count: int
    free_s: float = 0.0
    num_runs: int = 0


@dataclass(eq=False)
class RatedEvent:
    device: "RatedDevice"
    at_s: float | None = None

    def mark(self) -> None:
        self.at_s = max(self.device.current.free_s, self.device.now_s)

    def hold(self) -> None:
        raise AssertionError("nobody waits for anybody")

    def is_over(self) -> bool:
        return self.at_s is not None and self.at_s <= self.device.now_s

    def wait(self) -> None:
        assert self.at_s is not None
        self.device.now_s = max(self.device.now_s, self.at_s)


@dataclass
class RatedDevice:
    """See LaneDevice, and loads for it. Its clock goes on when the host gives work (launch_s) and when it waits.

    first_s: what the first run on a stream takes longer. slow_s: from its first work on; all takes twice its time.
    slower: by how much a run of a stream is slower than it should be, by its number. fails: the run that raises.
    """

    curve: Curve
    driver: FakeGreenDriver = field(default_factory=FakeGreenDriver)
    launch_s: float = 5e-6
    first_s: float = 0.01
    slow_s: float = 0.018
    slower: Callable[[int], float] = lambda _number: 1.0
    fails: int | None = None
    now_s: float = 0.0
    began_s: float = math.inf
    copy_bytes: int = 1 << 29
    product_operations: int = 2 * 4096**3
    given: list[tuple[str, int]] = field(default_factory=list)
    streams: list[RatedStream] = field(default_factory=list)
    workspaces: set[int] = field(default_factory=set)
    most_workspaces: int = 0
    is_open: bool = False

    def __post_init__(self) -> None:
        self.default = self.current = RatedStream(self.curve.num_processors)

    @property
    def num_processors(self) -> int:
        return self.curve.num_processors

    def stream(self, priority: int) -> RatedStream:
        assert priority == 0
        self.streams.append(RatedStream(self.num_processors))
        return self.streams[-1]

    def adopt(self, address: int) -> RatedStream:
        group = self.driver.contexts[self.driver.streams[address]]
        self.streams.append(RatedStream(group.count))
        return self.streams[-1]

    @contextmanager
    def on(self, stream: object) -> Iterator[None]:
        assert isinstance(stream, RatedStream)
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def event(self) -> RatedEvent:
        return RatedEvent(self)

    def elapsed_s(self, earlier: LaneEvent, later: LaneEvent) -> float:
        assert isinstance(earlier, RatedEvent)
        assert isinstance(later, RatedEvent)
        assert earlier.is_over(), "torch raises for an event that is not over"
        assert later.is_over(), "torch raises for an event that is not over"
        assert earlier.at_s is not None
        assert later.at_s is not None
        return later.at_s - earlier.at_s

    def wait(self) -> None:
        self.now_s = max(self.now_s, self.default.free_s, *(each.free_s for each in self.streams), 0.0)

    @property
    def is_idle(self) -> bool:
        return all(each.free_s <= self.now_s for each in (self.default, *self.streams))

    @contextmanager
    def opened(self) -> Iterator["RatedDevice"]:
        """The loads, which make their tensors on the caller's stream."""
        self.is_open = True
        self.default.free_s = self.now_s + 0.02
        try:
            yield self
        finally:
            assert self.is_idle, "tensors are given up while the device works on them"
            self.is_open = False

    def copy(self) -> None:
        self._give("copy", self.copy_bytes / self.curve.bytes_per_s(self.current.count))

    def product(self, num_processors: int) -> None:
        assert num_processors == self.current.count, "kernels are chosen for other processors"
        self.workspaces.add(id(self.current))
        self.most_workspaces = max(self.most_workspaces, len(self.workspaces))
        self._give("product", self.product_operations / self.curve.operations_per_s(self.current.count))

    def forget(self) -> None:
        assert self.is_idle, "workspaces are given up while the device works on them"
        self.workspaces.clear()

    def _give(self, kind: str, seconds: float) -> None:
        assert self.is_open
        assert self.default.free_s <= self.now_s, "the tensors are not filled yet"
        assert self.current is not self.default
        if len(self.given) == self.fails:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED\nwhen calling cublasGemmEx")
        self.given.append((kind, self.current.count))
        stream = self.current
        self.now_s += self.launch_s
        begins_s = max(stream.free_s, self.now_s)
        self.began_s = min(self.began_s, begins_s)
        seconds *= self.slower(stream.num_runs) * (2 if begins_s < self.began_s + self.slow_s else 1)
        others = [each.free_s for each in self.streams if each is not stream]
        assert max(others, default=0.0) <= self.now_s, "somebody else computes meanwhile"
        stream.free_s = begins_s + seconds + (0 if stream.num_runs else self.first_s)
        stream.num_runs += 1
