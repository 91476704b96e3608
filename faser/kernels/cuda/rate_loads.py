"""What a GPU is given to do while its processors are measured: an addition over large tensors, a large product.

Owns the tensors. Draws from a generator of its own: after a start that measures torch's numbers are the same as
after one that does not. None of it has run on a GPU yet.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from faser.kernels.cuda.device import products_without
from faser.kernels.cuda.green_contexts import GreenContextError
from faser.kernels.cuda.memory import DeviceMemory

_SIDE = 4096  # of the product's matrices: tiles for every processor several times over
_PRODUCT_BYTES = 3 * 2 * _SIDE**2
# Of each of the two tensors of a copy. Wanted are several times the caches of the largest GPUs; from the least on,
# what is read has left a cache of 50 or 60 MiB (H100, H200) when it is read again.
_WANTED_BYTES, _LEAST_BYTES = 256 << 20, 64 << 20
_ONE_MIB = 1 << 20


class CudaRateLoads:
    """See RateLoads. An addition moves, for a plain copy may be given to the copy engines, which no lane has.

    num_processors: of the whole device. tensor_bytes: of each of the two tensors of a copy.
    bindings: of torch; has what clears the workspaces that it keeps for cuBLAS by stream, some 32 MiB each.
    """

    def __init__(
        self,
        device: torch.device,
        num_processors: int,
        tensor_bytes: int,
        *,
        side: int = _SIDE,
        bindings: Any = torch._C,
    ) -> None:
        self._num_processors = num_processors
        self._bindings = bindings
        drawn = torch.Generator(device).manual_seed(0)
        self._source = torch.randint(256, (tensor_bytes // 2,), dtype=torch.int16, device=device, generator=drawn)
        self._target = torch.empty_like(self._source)
        # Not zeros, which take less power, and so are multiplied faster than anything that a model has.
        self._one, self._other = (
            torch.randn(side, side, dtype=torch.bfloat16, device=device, generator=drawn) for _ in range(2)
        )
        self._out = torch.empty_like(self._one)

    @property
    def copy_bytes(self) -> int:
        return self._source.nbytes + self._target.nbytes

    @property
    def product_operations(self) -> int:
        side = len(self._out)
        return 2 * side**3

    def copy(self) -> None:
        torch.add(self._source, 1, out=self._target)

    def product(self, num_processors: int) -> None:
        with products_without(self._num_processors - num_processors, self._bindings):
            torch.mm(self._one, self._other, out=self._out)

    def forget(self) -> None:
        """Workspaces of other streams go too: made again when they are needed, but lost to what was recorded.

        Where torch cannot clear them they stay until the process ends.
        """
        clear: Callable[[], None] | None = getattr(self._bindings, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:
            clear()

    def close(self) -> None:
        """Give up the tensors' memory, whoever still knows them. The device must have done everything."""
        self.forget()
        for tensor in (self._source, self._target, self._one, self._other, self._out):
            tensor.untyped_storage().resize_(0)


def copy_tensor_bytes(free_bytes: int) -> int:
    """Bytes of each tensor of a copy, whole MiB: no more than half of what is free is taken in all.

    Raises GreenContextError where that is too little.
    """
    left = free_bytes // 2 - _PRODUCT_BYTES
    size = min(_WANTED_BYTES, left // 2) // _ONE_MIB * _ONE_MIB
    if size < _LEAST_BYTES:
        needed = 2 * (_PRODUCT_BYTES + 2 * _LEAST_BYTES)
        raise GreenContextError(
            f"measuring processors takes {needed >> 20} MiB of free memory; there are {free_bytes >> 20}"
        )
    return size


@contextmanager
def rate_loads(device: torch.device, num_processors: int, memory: DeviceMemory) -> Iterator[CudaRateLoads]:
    """Loads that fit into what is free. Their memory is given back, to the device, when they are done with.

    Raises GreenContextError where there is too little, torch.OutOfMemoryError where somebody else was faster.
    """
    memory.release()
    try:
        loads = CudaRateLoads(device, num_processors, copy_tensor_bytes(memory.free_bytes()))
        try:
            yield loads
        finally:
            loads.close()
    finally:
        memory.release()
