"""Numbers between host and device at fixed places, so that recordings find them and no step allocates.

Owns pinned buffers and the fences that say when they may be used again. On the way to the device there are two
buffers: while the device may still be copying from one, the next step's numbers go into the other. Knows nothing
of what the numbers mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.kernels.cuda.device import Accelerator, Fence

_LEAST_BYTES = 256  # of a buffer that values are fetched into; larger ones are powers of 2
_LINE = 16  # bytes; values begin at multiples of it


class Staging:
    """A place on the device, and two on the host that take turns. device: [count]; hosts: [count] each."""

    @torch.inference_mode(False)  # so that whoever sends may do it outside of that mode
    def __init__(self, accelerator: Accelerator, count: int, dtype: torch.dtype) -> None:
        self._accelerator = accelerator
        self.device = torch.zeros(count, dtype=dtype, device=accelerator.device)
        self.hosts = tuple(accelerator.host_numbers(count, dtype).zero_() for _ in range(2))
        self._copied: tuple[Fence, ...] = tuple(accelerator.fence() for _ in self.hosts)
        self._next = 0

    def claim(self) -> int:
        """Which of the hosts is to be filled for the next send: waits until what it sent before was copied."""
        self._copied[self._next].wait()
        return self._next

    def send(self, count: int | None = None) -> None:
        """Give the copy of the host that was claimed to the device: of its first count numbers; None: of all."""
        at = self._next
        source, target = self.hosts[at], self.device
        if count is not None:
            source, target = source[:count], target[:count]
        self._accelerator.transfer(source, target)
        self._copied[at].mark()
        self._next = 1 - at


class StagedNumbers:
    """See Stage. Numbers that are there already are not sent again: passes of a draft say much twice."""

    def __init__(self, accelerator: Accelerator, count: int, dtype: torch.dtype) -> None:
        self._staging = Staging(accelerator, count, dtype)
        self._hosts: list[NDArray[Any]] = [each.numpy() for each in self._staging.hosts]

    @property
    def device(self) -> Tensor:
        return self._staging.device

    def host(self) -> NDArray[Any]:
        return self._hosts[self._staging.claim()]

    def send(self) -> None:
        """See Stage. The other host holds what was sent last, or zeros, as the device does before that."""
        claimed, sent = self._hosts
        if claimed.tobytes() != sent.tobytes():  # no slower than to compare them where they are
            self._staging.send()


@dataclass(frozen=True, slots=True)
class _Span:
    """Of one value in a buffer, as a copy's target and as what the host reads."""

    target: Tensor
    array: NDArray[Any]


_Kind = tuple[tuple[torch.Size, torch.dtype], ...]  # shapes and types of values that are fetched together


@dataclass(frozen=True, slots=True)
class _Landing:
    """Where fetched values arrive. buffer: [capacity] uint8, pinned. places: of all kinds that were here."""

    buffer: Tensor
    arrived: Fence
    places: dict[_Kind, tuple[_Span, ...]] = field(default_factory=dict)

    def of(self, values: Sequence[Tensor]) -> tuple[_Span, ...]:
        """Places of such values, one behind the other."""
        kind = tuple([(each.shape, each.dtype) for each in values])
        found = self.places.get(kind)
        if found is None:
            found = self.places[kind] = self._cut(values)
        return found

    @torch.inference_mode(False)  # so that whoever waits may do it outside of that mode
    def _cut(self, values: Sequence[Tensor]) -> tuple[_Span, ...]:
        places, start = [], 0
        for each in values:
            target = self.buffer[start : start + each.numel() * each.itemsize].view(each.dtype).view(each.shape)
            places.append(_Span(target, target.numpy()))
            start += _lines(each)
        return tuple(places)


class FetchedValues:
    """See Fetch. Its buffer goes back when the values are first waited for."""

    def __init__(self, landing: _Landing, places: tuple[_Span, ...], free: list[_Landing]) -> None:
        self._landing = landing
        self._places = places
        self._free = free
        self._values: tuple[NDArray[Any], ...] | None = None

    def wait(self) -> tuple[NDArray[Any], ...]:
        if self._values is None:
            self._landing.arrived.wait()
            self._values = tuple([each.array.copy() for each in self._places])
            self._free.append(self._landing)
        return self._values


class Fetcher:
    """Brings values to the host. Buffers of values that nobody waits for are given up to torch."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._free: dict[int, list[_Landing]] = {}

    def fetch(self, values: Sequence[Tensor]) -> FetchedValues:
        """See Capture.fetch. Values of types that numpy has."""
        capacity = max(_LEAST_BYTES, 1 << (sum(map(_lines, values)) - 1).bit_length()) if values else _LEAST_BYTES
        free = self._free.setdefault(capacity, [])
        landing = free.pop() if free else self._new(capacity)
        places = landing.of(values)
        for value, place in zip(values, places, strict=True):
            self._accelerator.transfer(value, place.target)
        landing.arrived.mark()
        return FetchedValues(landing, places, free)

    @torch.inference_mode(False)
    def _new(self, capacity: int) -> _Landing:
        return _Landing(self._accelerator.host_numbers(capacity, torch.uint8), self._accelerator.fence())


def _lines(value: Tensor) -> int:
    """Bytes that a value takes, with what is left of its last line."""
    return -(-value.numel() * value.itemsize // _LINE) * _LINE
