"""How full a GPU's memory is, as its driver and torch's allocator count it.

The driver counts everything that anybody holds on the device; the allocator what this process's tensors hold, and
what it keeps for later tensors. Knows nothing of models.
"""

import gc
from typing import Protocol

import torch


class DeviceMemory(Protocol):
    """Counts, in bytes, of one device."""

    @property
    def name(self) -> str:
        """The device, as messages call it."""
        ...

    @property
    def total_bytes(self) -> int: ...

    def free_bytes(self) -> int:
        """What nobody holds, other processes and torch's allocator included."""
        ...

    def held_bytes(self) -> int:
        """What torch's allocator holds, for tensors or for later ones."""
        ...

    def peak_bytes(self) -> int:
        """The most that torch's allocator held since reset_peak."""
        ...

    def reset_peak(self) -> None: ...

    def release(self) -> None:
        """Wait for the device, and give back what torch's allocator keeps for later tensors."""
        ...


class CudaMemory:
    """See DeviceMemory. The first question starts CUDA on the device, which takes some hundred MiB itself."""

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
