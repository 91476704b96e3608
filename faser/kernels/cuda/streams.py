"""CUDA streams of lanes: making them, making one the thread's current stream, and events with times.

Knows nothing of what is computed. A stream is opaque to the caller.
"""

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from faser.kernels.cuda.events import CudaEvent, DeviceEvent


class LaneDevice(Protocol):
    """What a partition needs of a GPU."""

    @property
    def num_processors(self) -> int:
        """Streaming multiprocessors."""
        ...

    def stream(self, priority: int) -> object:
        """A stream on all processors that waits for no other stream. priority: 0 or less, the least first."""
        ...

    def adopt(self, address: int) -> object:
        """The CUDA stream at an address, for torch. Its maker still owns it."""
        ...

    def on(self, stream: object) -> AbstractContextManager[object]:
        """Makes it the calling thread's current stream, and restores the previous one."""
        ...

    def event(self) -> DeviceEvent:
        """A new event with times, not recorded yet."""
        ...

    def elapsed_s(self, earlier: DeviceEvent, later: DeviceEvent) -> float:
        """Seconds of the device's clock between two events that the device has passed."""
        ...

    def wait(self) -> None:
        """Return when all work of all streams is done."""
        ...


class CudaLaneDevice:
    """See LaneDevice. device: with its index. Initialises CUDA on it."""

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

    def event(self) -> CudaEvent:
        return CudaEvent(self._device, times=True)

    def elapsed_s(self, earlier: DeviceEvent, later: DeviceEvent) -> float:
        assert isinstance(earlier, CudaEvent), earlier
        assert isinstance(later, CudaEvent), later
        return earlier.elapsed_s(later)

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)
