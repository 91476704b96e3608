"""Memory of the native backend: zeroed, in huge pages where the system has them, 64-byte aligned."""

import mmap
import threading

import torch
from torch import Tensor

_HUGE_PAGE_BYTES = 2 << 20


def allocate(num_bytes: int) -> Tensor:
    """Zeroed bytes at a huge page boundary, in huge pages if available. Untouched pages cost no memory."""
    # Private: shared memory, the default, gets no huge pages.
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE_BYTES
    return whole[start : start + num_bytes]


class Slabs:
    """Gives small pieces of slabs of this size, so that huge pages cover them too. For any threads."""

    def __init__(self, slab_bytes: int) -> None:
        self._slab_bytes = slab_bytes
        self._lock = threading.Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)  # of the newest slab

    def take(self, num_bytes: int) -> Tensor:
        """A piece of the current slab. Pieces keep their slab alive."""
        rounded = -(-num_bytes // 64) * 64
        with self._lock:
            if len(self._rest) < rounded:
                self._rest = allocate(max(rounded, self._slab_bytes))
            piece, self._rest = self._rest[:num_bytes], self._rest[rounded:]
        return piece
