"""CUDA events: points in the work enqueued on a device, which can be waited for."""

from typing import Protocol

import torch


class DeviceEvent(Protocol):
    """A point in a stream's work. The current stream is the calling thread's. May be recorded again and again."""

    def record(self) -> None:
        """Set it after everything enqueued on the current stream. Does not wait."""
        ...

    def hold_stream(self) -> None:
        """Later work of the current stream begins once the device has passed the event. The host does not wait.

        Holds nothing where the event was never recorded.
        """
        ...

    def query(self) -> bool:
        """Whether the device has passed it. Does not wait."""
        ...

    def synchronize(self) -> None:
        """Return once the device has passed it; at once where it was never recorded."""
        ...


class CudaEvent:
    """See DeviceEvent. times: the device notes when it passes the event; recording one without is cheaper.

    `synchronize` spins within the driver, without the interpreter's lock, and ends within microseconds of the
    event. Polling from Python would hold the lock, and a blocking event wakes the thread tens of microseconds
    late.
    """

    def __init__(self, device: torch.device, *, times: bool = False) -> None:
        self._device = device
        self._event = torch.cuda.Event(enable_timing=times)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def hold_stream(self) -> None:
        self._event.wait(torch.cuda.current_stream(self._device))

    def query(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        self._event.synchronize()

    def elapsed_s(self, later: "CudaEvent") -> float:
        """Seconds of the device's clock from this event to a later one; both note times and are passed."""
        return float(self._event.elapsed_time(later._event)) / 1000
