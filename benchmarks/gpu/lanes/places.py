"""Which of a GPU's processors blocks run on: a probe that shows whether a lane stays on its own processors.

Each block of the kernel reads the number of its processor (%smid of PTX) and counts itself there. A CUDA graph can
capture it like any kernel. The numbers are the hardware's: they may exceed the number of processors and have gaps.

Parts of a device that work can be given to, by their number of processors: green contexts, or a CPU's threads.

Owns the contexts and streams that it makes. Knows no partition of an engine: here one part is used at a time.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from faser.errors import EngineError
from faser.kernels.cuda.green_contexts import GROUP_UNIT, GreenDriver
from faser.kernels.cuda.streams import LaneDevice
from faser.kernels.cuda.triton.common.tensors import EXACT, expect, jit

MOST_PROCESSORS = 1024  # all numbers are below; no GPU has a quarter of that many
_BLOCKS_EACH = 16  # as many blocks of four warps as a processor holds at once, so that every processor gets some


@jit
def _count_blocks(counts, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Blocks sleep for a moment, so that later blocks find this processor occupied."""
    block = tl.program_id(0)
    processor = tl.inline_asm_elementwise(
        "mov.u32 $0, %smid; nanosleep.u32 20000;", "=r,r", [block], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.atomic_add(counts + processor, 1, mask=processor < MOST)


def count_blocks(counts: Tensor, num_processors: int) -> None:
    """Launch enough blocks for every processor, and add to counts[i] how many of them ran on processor i.

    counts: [MOST_PROCESSORS] int32, on the GPU. num_processors: of the device. Launches on the current stream;
    does not wait. Raises EngineError for other counts, and in Triton's interpreter.
    """
    if counts.device.type != "cuda":
        raise EngineError(f"only blocks on a GPU have a processor; counts is on {counts.device}")
    if not isinstance(_count_blocks, triton.JITFunction):
        raise EngineError("Triton's interpreter runs blocks on no processor; TRITON_INTERPRET switches it on")
    expect("counts", counts, (MOST_PROCESSORS,), torch.int32, like=counts)
    _count_blocks[(num_processors * _BLOCKS_EACH,)](counts, MOST=MOST_PROCESSORS, num_warps=4, **EXACT)


def blocks_by_processor(stream: torch.cuda.Stream) -> dict[int, int]:
    """Launch the kernel on this stream; the number of blocks that ran on each processor, by its number. Waits.

    Raises EngineError for anything but a stream of a GPU, and in Triton's interpreter.
    """
    if not isinstance(stream, torch.cuda.Stream):
        raise EngineError(f"only blocks on a GPU have a processor; {stream!r} is no stream of a GPU")
    with torch.cuda.stream(stream):
        counts = torch.zeros(MOST_PROCESSORS, dtype=torch.int32, device=stream.device)
        count_blocks(counts, torch.cuda.get_device_properties(stream.device).multi_processor_count)
        found: list[int] = counts.tolist()
    return {processor: count for processor, count in enumerate(found) if count}


def processors_of(stream: torch.cuda.Stream) -> set[int]:
    """Numbers of the processors that run blocks of this stream. See blocks_by_processor."""
    return set(blocks_by_processor(stream))


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
