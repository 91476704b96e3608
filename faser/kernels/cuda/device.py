"""One CUDA device: whether it can be used, and the few things that only CUDA has.

Owns pinned memory, transfers, events and what records work. Knows nothing of attention or of the library whose
kernels run there. Importing this module starts nothing on a device. What is said of streams, events and recordings
is read in torch's sources; it has not run on a GPU yet.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from faser.errors import ConfigError
from faser.kernels.interface.graph_capture import CapturedGraph
from faser.kernels.interface.processors import DeviceLane

LOWEST_CAPABILITY = (8, 0)  # bfloat16 products and the attention kernels begin with Ampere
WARM_UPS = 2  # kernels are loaded in the first run; the second one allocates nothing that the first one made


class Fence(Protocol):
    """A point in the work given to a device, which can be set anew."""

    def mark(self) -> None:
        """Set it behind everything that was given to the current stream. Does not wait."""
        ...

    def wait(self) -> None:
        """Return when everything before the mark is done; at once where nothing was marked."""
        ...


class Recorder(Protocol):
    """Records work; all its recordings share one pool of memory."""

    def record(self, work: Callable[[], None]) -> CapturedGraph:
        """See Capture.record."""
        ...

    @property
    def recorded_bytes(self) -> int:
        """Device memory that was allocated while recording."""
        ...


class Accelerator(Protocol):
    """What a backend asks of its device beside kernels. Everything is in order of the caller's current stream."""

    @property
    def device(self) -> torch.device: ...

    @property
    def num_processors(self) -> int:
        """Streaming multiprocessors."""
        ...

    def host_numbers(self, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """[count] on the CPU, uninitialised, from where transfers need no second copy."""
        ...

    def upload(self, numbers: Tensor) -> Tensor:
        """A copy on the device of what host_numbers gave. Does not wait: the source must keep its values."""
        ...

    def transfer(self, source: Tensor, target: Tensor) -> None:
        """Copy between the device and what host_numbers gave, either way. Does not wait: see Fence."""
        ...

    def fence(self) -> Fence:
        """A new one, not marked."""
        ...

    def recorder(self, place: DeviceLane | None = None) -> Recorder:
        """A new one, with memory of its own, of work for a part of the device; None: for all of it."""
        ...

    def wait(self) -> None:
        """Return when everything given to the device is done."""
        ...

    def wide_product(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        """out = x @ weight, never rounded to less than float32. x: [R, K], weight: [K, N] 16 bit; out: float32."""
        ...


class _EventFence:
    """Waiting spins within the driver, without the interpreter's lock: that ends within microseconds of the event.

    Asking again and again from Python would hold the lock, and a blocking event wakes tens of microseconds late.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        self._event.synchronize()


class CudaRecorder:
    """See Recorder. Records on the place's stream, or one of its own, since the default one cannot be recorded.

    What is recorded stays on the processors of the stream that it was recorded on, whichever stream replays it.
    idle_processors: those that the place does not have.
    """

    def __init__(self, device: torch.device, place: DeviceLane | None = None, *, idle_processors: int = 0) -> None:
        self._device = device
        self._stream = stream_of(place, device)
        self._idle_processors = idle_processors
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Other threads may use the device meanwhile: only what this one does is held to the rules."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with products_without(self._idle_processors):
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    work()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                work()
        return graph

    @property
    def recorded_bytes(self) -> int:
        """Whole segments of the allocator. Looks through all of them: not for every step."""
        pool = tuple(self._pool)
        return sum(
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            if tuple(segment["segment_pool_id"]) == pool
        )


def stream_of(place: DeviceLane | None, device: torch.device) -> torch.cuda.Stream:
    """That a place's work is given to; a new one for the whole device."""
    if place is None:
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    assert isinstance(place.stream, torch.cuda.Stream), f"the {place.name} lane's stream is {place.stream!r}"
    return place.stream


@contextmanager
def products_without(idle_processors: int, bindings: Any = torch._C) -> Iterator[None]:
    """Let cuBLAS choose kernels for a device that has so many processors less.

    torch keeps that number for the whole process, so nobody else may compute meanwhile. Where torch does not know
    of it, kernels are chosen for the whole device: right, but cut for more processors than there are.
    """
    choose = getattr(bindings, "_set_sm_carveout_experimental", None)
    if choose is None or not idle_processors:
        yield
        return
    choose(idle_processors)
    try:
        yield
    finally:
        choose(None)


class CudaDevice:
    """See Accelerator. device: as open_cuda checked it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def num_processors(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def host_numbers(self, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def upload(self, numbers: Tensor) -> Tensor:
        """torch lends pinned memory out again only when the transfers that read it are done."""
        return numbers.to(self.device, non_blocking=True)

    def transfer(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def fence(self) -> Fence:
        return _EventFence(self.device)

    def recorder(self, place: DeviceLane | None = None) -> CudaRecorder:
        idle = 0 if place is None else self.num_processors - place.num_processors
        return CudaRecorder(self.device, place, idle_processors=idle)

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def wide_product(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        return torch.mm(x, weight, out_dtype=torch.float32, out=out)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaFacts:
    """What torch can say of CUDA here.

    build: the CUDA version that torch was built for; None: none. capabilities: (major, minor) of every device.
    """

    build: str | None
    capabilities: tuple[tuple[int, int], ...]


def cuda_facts() -> CudaFacts:
    """Asks torch, and through it the driver."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return CudaFacts(
        build=torch.version.cuda,
        capabilities=tuple(torch.cuda.get_device_capability(index) for index in range(count)),
    )


def open_cuda(device: str, facts: CudaFacts) -> torch.device:
    """The device called cuda or cuda:N, with its number.

    Raises ConfigError that names what is missing: torch's CUDA build, a device, that device, its capability.
    """
    wanted = torch.device(device)
    assert wanted.type == "cuda", device
    if facts.build is None:
        raise ConfigError(f"device is {device}; torch {torch.__version__} is built without CUDA")
    if not facts.capabilities:
        raise ConfigError(f"device is {device}; torch finds no CUDA device (a driver for CUDA {facts.build}?)")
    index = wanted.index or 0
    if index >= len(facts.capabilities):
        raise ConfigError(f"device is {device}; this machine has {len(facts.capabilities)} CUDA devices")
    if facts.capabilities[index] < LOWEST_CAPABILITY:
        have, need = (f"{major}.{minor}" for major, minor in (facts.capabilities[index], LOWEST_CAPABILITY))
        raise ConfigError(f"device is {device}, of compute capability {have}; at least {need} is needed")
    return torch.device("cuda", index)
