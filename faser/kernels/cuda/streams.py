"""What lanes on a GPU need of torch: streams, which of them is a thread's current one, and events with times.

Knows nothing of what is computed. Streams are opaque to whoever asks for them. None of it has run on a GPU yet.
"""

from contextlib import AbstractContextManager
from typing import Protocol

import torch


class LaneEvent(Protocol):
    """A point in the work given to a device, which can be set anew, and the time at which the device got there."""

    def mark(self) -> None:
        """Set it behind everything that was given to the calling thread's current stream. Does not wait."""
        ...

    def hold(self) -> None:
        """What is given to the calling thread's current stream from now on comes behind it. Does not wait.

        At once where nothing was marked.
        """
        ...

    def is_over(self) -> bool:
        """Whether the device got there. Does not wait."""
        ...

    def wait(self) -> None:
        """Return when the device got there."""
        ...


class LaneDevice(Protocol):
    """One device, as those see it who divide it."""

    @property
    def num_processors(self) -> int: ...

    def stream(self, priority: int) -> object:
        """A stream that waits for no other, on all processors. priority: 0 or less; the least is served first."""
        ...

    def adopt(self, address: int) -> object:
        """The stream at an address, as torch uses it. It stays whose it was."""
        ...

    def on(self, stream: object) -> AbstractContextManager[object]:
        """Makes it the calling thread's current stream, and then what was current before."""
        ...

    def event(self) -> LaneEvent:
        """A new one, not marked."""
        ...

    def elapsed_s(self, earlier: LaneEvent, later: LaneEvent) -> float:
        """Of the device's time, between two events that are over."""
        ...

    def wait(self) -> None:
        """Return when everything given to the device is done, whatever the stream."""
        ...


class _TimedEvent:
    """Waiting spins within the driver, without the interpreter's lock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        self.event.record(torch.cuda.current_stream(self._device))

    def hold(self) -> None:
        self.event.wait(torch.cuda.current_stream(self._device))

    def is_over(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()


class CudaLaneDevice:
    """See LaneDevice. device: with its number. Begins to use it."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda", device
        self._device = device
        torch.cuda.synchronize(device)

    @property
    def num_processors(self) -> int:
        return int(torch.cuda.get_device_properties(self._device).multi_processor_count)

    def stream(self, priority: int) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device, priority=priority)  # type: ignore[no-untyped-call]

    def adopt(self, address: int) -> torch.cuda.Stream:
        return torch.cuda.ExternalStream(address, device=self._device)  # type: ignore[no-untyped-call]

    def on(self, stream: object) -> AbstractContextManager[object]:
        assert isinstance(stream, torch.cuda.Stream), stream
        return torch.cuda.stream(stream)

    def event(self) -> LaneEvent:
        return _TimedEvent(self._device)

    def elapsed_s(self, earlier: LaneEvent, later: LaneEvent) -> float:
        assert isinstance(earlier, _TimedEvent), earlier
        assert isinstance(later, _TimedEvent), later
        return float(earlier.event.elapsed_time(later.event)) / 1000

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)
