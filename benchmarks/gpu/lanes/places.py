"""Parts of a device that work can be given to, by their number of processors: green contexts, or a CPU's threads.

Owns the contexts and streams that it makes. Knows no partition of an engine: here one part is used at a time.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import torch

from faser.kernels.cuda.lanes import GROUP_UNIT, GreenDriver, LaneDevice


class Places(Protocol):
    """One device in parts."""

    @property
    def num_processors(self) -> int: ...

    def widths(self) -> tuple[int, ...]:
        """How many processors a part may have, ascending; the last one is all."""
        ...

    def split(self, width: int) -> tuple[int, int]:
        """What becomes of a wish for so many: processors of the part, and those left. Raises GreenContextError."""
        ...

    def on(self, width: int) -> AbstractContextManager[object]:
        """Work of the calling thread goes to a part of this width meanwhile. Raises GreenContextError."""
        ...

    def close(self) -> None:
        """Nothing may be running there."""
        ...


class GreenPlaces:
    """See Places. Of a GPU; the widest place is a plain stream. Every part is made once."""

    def __init__(self, driver: GreenDriver, device: LaneDevice) -> None:
        self._driver = driver
        self._device = device
        self._made = ExitStack()
        self._streams: dict[int, object] = {}

    @property
    def num_processors(self) -> int:
        return self._driver.num_processors

    def widths(self) -> tuple[int, ...]:
        parts = range(GROUP_UNIT, self.num_processors, GROUP_UNIT)
        return (*parts, self.num_processors)

    def split(self, width: int) -> tuple[int, int]:
        group, rest = self._driver.split(width)
        return group.count, rest.count

    def on(self, width: int) -> AbstractContextManager[object]:
        if width not in self._streams:
            self._streams[width] = self._stream(width)
        return self._device.on(self._streams[width])

    def close(self) -> None:
        self._device.wait()
        self._streams.clear()
        self._made.close()

    def _stream(self, width: int) -> object:
        if width == self.num_processors:
            return self._device.stream(0)
        group, _ = self._driver.split(width)
        context = self._driver.context(group)
        self._made.callback(self._driver.destroy_context, context)
        address = self._driver.stream(context, 0)
        self._made.callback(self._driver.destroy_stream, address)
        return self._device.adopt(address)


class ThreadPlaces:
    """See Places. A stand-in on a CPU: so many of torch's threads."""

    def __init__(self, num_processors: int) -> None:
        self._num_processors = num_processors

    @property
    def num_processors(self) -> int:
        return self._num_processors

    def widths(self) -> tuple[int, ...]:
        return tuple(sorted({1, self._num_processors}))

    def split(self, width: int) -> tuple[int, int]:
        return width, self._num_processors - width

    @contextmanager
    def on(self, width: int) -> Iterator[object]:
        before = torch.get_num_threads()
        torch.set_num_threads(width)
        try:
            yield None
        finally:
            torch.set_num_threads(before)

    def close(self) -> None:
        pass
