"""Simulated device memory, counted in bytes."""

from dataclasses import dataclass

import torch


@dataclass(slots=True, kw_only=True)
class FakeMemory:
    """See DeviceMemory. Like torch's, its allocator keeps freed memory in a cache until `release`.

    others: what other processes hold. past: what this one holds past the allocator. in_use, kept: what the
    allocator holds for tensors, and for later ones.
    """

    total_bytes: int
    others: int = 0
    past: int = 0
    in_use: int = 0
    kept: int = 0
    peak: int = 0
    name: str = "cuda:0"

    def allocate(self, size: int) -> None:
        """Raises torch.OutOfMemoryError as torch does, after it has emptied its cache."""
        self.kept = max(0, self.kept - size)
        self.in_use += size
        if self.free_bytes() < 0:
            self.kept = 0
        if self.free_bytes() < 0:
            self.in_use -= size
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.peak = max(self.peak, self.held_bytes())

    def free(self, size: int) -> None:
        assert size <= self.in_use
        self.in_use -= size
        self.kept += size

    def free_bytes(self) -> int:
        return self.total_bytes - self.others - self.past - self.held_bytes()

    def held_bytes(self) -> int:
        return self.in_use + self.kept

    def peak_bytes(self) -> int:
        return self.peak

    def reset_peak(self) -> None:
        self.peak = self.held_bytes()

    def release(self) -> None:
        self.kept = 0
