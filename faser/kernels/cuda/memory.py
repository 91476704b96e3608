"""How full a GPU's memory is, as the driver and torch's caching allocator count it.

The driver counts the memory of all processes; the allocator counts what it reserved in this process, for tensors
and as its cache. Knows nothing of models.
"""

import gc
from typing import Protocol

import torch


class DeviceMemory(Protocol):
    """Memory of one device, in bytes."""

    @property
    def name(self) -> str:
        """The device, as messages call it."""
        ...

    @property
    def total_bytes(self) -> int: ...

    def free_bytes(self) -> int:
        """Free according to the driver: neither another process nor torch's allocator holds it."""
        ...

    def held_bytes(self) -> int:
        """Reserved by torch's allocator, its cache included."""
        ...

    def peak_bytes(self) -> int:
        """The largest held_bytes since reset_peak."""
        ...

    def reset_peak(self) -> None: ...

    def release(self) -> None:
        """Wait for the device, and empty the allocator's cache."""
        ...


class CudaMemory:
    """See DeviceMemory. The first call initialises CUDA on the device, which takes some hundred MiB."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda", device
        self.name = str(device)
        self._device = device

    @property
    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def held_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def release(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
