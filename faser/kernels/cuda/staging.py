"""Pinned memory between host and device: staging buffers on the way there, readbacks on the way back.

Owns the pinned buffers and the events that say when each may be used again. Addresses on the device stay the
same, so that CUDA graphs can read them, and no step allocates. A staging buffer has two pinned halves: while the
device may still copy from one, the host fills the other for the next step. Knows nothing of what the numbers
mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.kernels.cuda.device import Accelerator, DeviceEvent

_LEAST_BYTES = 256  # of a readback's buffer; sizes are powers of 2
_ALIGNMENT = 16  # bytes; each value of a readback begins at a multiple


class DoubleBuffer:
    """One buffer on the device and two pinned ones that take turns. device: [count]; hosts: [count] each."""

    @torch.inference_mode(False)  # so that callers outside of that mode may send
    def __init__(self, accelerator: Accelerator, count: int, dtype: torch.dtype) -> None:
        self._accelerator = accelerator
        self.device = torch.zeros(count, dtype=dtype, device=accelerator.device)
        self.hosts = tuple(accelerator.host_numbers(count, dtype).zero_() for _ in range(2))
        self._copied: tuple[DeviceEvent, ...] = tuple(accelerator.event() for _ in self.hosts)
        self._next = 0

    def claim(self) -> int:
        """Index of the pinned buffer to fill for the next send. Waits until its previous numbers were copied."""
        self._copied[self._next].synchronize()
        return self._next

    def send(self, count: int | None = None) -> None:
        """Enqueue the copy of the claimed buffer: of its first count numbers; None: of all."""
        at = self._next
        source, target = self.hosts[at], self.device
        if count is not None:
            source, target = source[:count], target[:count]
        self._accelerator.transfer(source, target)
        self._copied[at].record()
        self._next = 1 - at


class PinnedStagingBuffer:
    """Staging buffer in pinned memory. It sends no number that the device has: passes of a draft repeat many."""

    def __init__(self, accelerator: Accelerator, count: int, dtype: torch.dtype) -> None:
        self._buffer = DoubleBuffer(accelerator, count, dtype)
        self._hosts: list[NDArray[Any]] = [each.numpy() for each in self._buffer.hosts]
        self._changes = False

    @property
    def device(self) -> Tensor:
        return self._buffer.device

    def host(self) -> NDArray[Any]:
        return self._hosts[self._buffer.claim()]

    def send(self) -> None:
        """See StagingBuffer. The other pinned buffer holds what the device has: the last send, or zeros."""
        claimed, sent = self._hosts
        if self._changes or claimed.tobytes() != sent.tobytes():  # as fast as comparing the arrays in place
            self._buffer.send()
            self._changes = False

    def will_change(self) -> None:
        self._changes = True


@dataclass(frozen=True, slots=True)
class _Slice:
    """The part of a buffer that holds one value: as the copy's target, and as the array that the host reads."""

    target: Tensor
    array: NDArray[Any]


_Layout = tuple[tuple[torch.Size, torch.dtype], ...]  # shapes and types of values that are read back together


@dataclass(frozen=True, slots=True)
class _ReadbackBuffer:
    """buffer: [capacity] uint8, pinned. arrived: recorded after the copies. slices: by layout."""

    buffer: Tensor
    arrived: DeviceEvent
    slices: dict[_Layout, tuple[_Slice, ...]] = field(default_factory=dict)

    def slices_of(self, values: Sequence[Tensor]) -> tuple[_Slice, ...]:
        """Slices for values of these shapes and types, in their order."""
        layout = tuple([(each.shape, each.dtype) for each in values])
        found = self.slices.get(layout)
        if found is None:
            found = self.slices[layout] = self._cut(values)
        return found

    @torch.inference_mode(False)  # so that callers outside of that mode may wait
    def _cut(self, values: Sequence[Tensor]) -> tuple[_Slice, ...]:
        slices, start = [], 0
        for each in values:
            target = self.buffer[start : start + each.numel() * each.itemsize].view(each.dtype).view(each.shape)
            slices.append(_Slice(target, target.numpy()))
            start += _aligned_bytes(each)
        return tuple(slices)


class PinnedReadback:
    """Readback in pinned memory. The first wait returns its buffer to `free`."""

    def __init__(self, buffer: _ReadbackBuffer, slices: tuple[_Slice, ...], free: list[_ReadbackBuffer]) -> None:
        self._buffer = buffer
        self._slices = slices
        self._free = free
        self._values: tuple[NDArray[Any], ...] | None = None

    def wait(self) -> tuple[NDArray[Any], ...]:
        if self._values is None:
            self._buffer.arrived.synchronize()
            self._values = tuple([each.array.copy() for each in self._slices])
            self._free.append(self._buffer)
        return self._values


class ReadbackPool:
    """Starts readbacks and reuses their pinned buffers. A readback that is never waited for returns none."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._free: dict[int, list[_ReadbackBuffer]] = {}

    def read_back(self, values: Sequence[Tensor]) -> PinnedReadback:
        """Enqueue copies of the values to the host. Their types must be types of numpy."""
        num_bytes = sum(map(_aligned_bytes, values))
        capacity = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length()) if values else _LEAST_BYTES
        free = self._free.setdefault(capacity, [])
        buffer = free.pop() if free else self._new(capacity)
        slices = buffer.slices_of(values)
        for value, part in zip(values, slices, strict=True):
            self._accelerator.transfer(value, part.target)
        buffer.arrived.record()
        return PinnedReadback(buffer, slices, free)

    @torch.inference_mode(False)
    def _new(self, capacity: int) -> _ReadbackBuffer:
        return _ReadbackBuffer(self._accelerator.host_numbers(capacity, torch.uint8), self._accelerator.event())


def _aligned_bytes(value: Tensor) -> int:
    return -(-value.numel() * value.itemsize // _ALIGNMENT) * _ALIGNMENT
