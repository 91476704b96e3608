"""One CUDA device: whether it can be used, its memory, transfers, events and graph capture.

Knows nothing of attention or of the library whose kernels run there. Importing it initialises no device.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from faser.errors import ConfigError
from faser.kernels.interface.graph_capture import CapturedGraph
from faser.kernels.interface.shapes import DeviceLane

LOWEST_CAPABILITY = (8, 0)  # bfloat16 products and the attention kernels begin with Ampere
WARM_UPS = 2  # the first run before a capture loads kernels, the second reuses the memory that the first allocated


class DeviceEvent(Protocol):
    """A point in a stream's work. The current stream is the calling thread's. May be recorded again and again."""

    def record(self) -> None:
        """Set it after everything enqueued on the current stream. Does not wait."""
        ...

    def hold_stream(self) -> None:
        """Later work of the current stream begins once the device has passed the event. The host does not wait.

        Holds nothing where the event was never recorded.
        """
        ...

    def query(self) -> bool:
        """Return whether the device has passed it. Does not wait."""
        ...

    def synchronize(self) -> None:
        """Return once the device has passed it; at once where it was never recorded."""
        ...


class CudaEvent:
    """Event of CUDA. times: the device notes when it passes the event; recording one without is cheaper.

    `synchronize` spins within the driver, without the interpreter's lock, and ends within microseconds of the
    event. Polling from Python would hold the lock, and a blocking event wakes the thread tens of microseconds
    late.
    """

    def __init__(self, device: torch.device, *, times: bool = False) -> None:
        self._device = device
        self._event = torch.cuda.Event(enable_timing=times)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def hold_stream(self) -> None:
        self._event.wait(torch.cuda.current_stream(self._device))

    def query(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        self._event.synchronize()

    def elapsed_s(self, later: "CudaEvent") -> float:
        """Seconds of the device's clock from this event to a later one; both note times and are passed."""
        return float(self._event.elapsed_time(later._event)) / 1000


class GraphRecorder(Protocol):
    """Captures CUDA graphs, which all share one memory pool."""

    def capture(self, work: Callable[[], None]) -> CapturedGraph:
        """Run the work until its kernels are ready, then capture it. See GraphCapture."""
        ...

    @property
    def graph_bytes(self) -> int:
        """Device memory of the pool."""
        ...


class Accelerator(Protocol):
    """Device of a backend, besides kernels. Work is enqueued on the caller's current stream."""

    @property
    def device(self) -> torch.device: ...

    @property
    def num_processors(self) -> int:
        """Streaming multiprocessors."""
        ...

    def host_numbers(self, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return numbers [count] in pinned memory, uninitialised."""
        ...

    def upload(self, numbers: Tensor) -> Tensor:
        """A copy of pinned numbers on the device. Does not wait: the source must keep its values."""
        ...

    def transfer(self, source: Tensor, target: Tensor) -> None:
        """Copy between the device and pinned memory, either way. Does not wait: an event says when it is done."""
        ...

    def event(self) -> DeviceEvent:
        """A new event without times, not recorded yet."""
        ...

    def graph_recorder(self, lane: DeviceLane | None = None) -> GraphRecorder:
        """A new one, with a memory pool of its own, for work of a lane; None: of the whole device."""
        ...

    def wait(self) -> None:
        """Return when all work of all streams is done."""
        ...

    def wide_product(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        """out = x @ weight, summed and stored in float32. x: [R, K], weight: [K, N], both 16 bit; out: [R, N]."""
        ...


class CudaGraphRecorder:
    """Recorder of CUDA graphs, on the lane's stream, or on its own: the default stream allows no capture.

    A graph's kernels stay on the processors of the stream it was captured on, whichever stream replays it.
    idle_processors: those of the device that are not the lane's.
    """

    def __init__(self, device: torch.device, lane: DeviceLane | None = None, *, idle_processors: int = 0) -> None:
        self._device = device
        self._stream = stream_of(lane, device)
        self._idle_processors = idle_processors
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Other threads may use the device meanwhile: CUDA's rules of capture bind the calling thread only."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with cublas_carveout(self._idle_processors):
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    work()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                work()
        return graph

    @property
    def graph_bytes(self) -> int:
        """Whole segments of torch's allocator. Walks through all of them: not for use in a step."""
        pool = tuple(self._pool)
        return sum(
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
            if tuple(segment["segment_pool_id"]) == pool
        )


def stream_of(lane: DeviceLane | None, device: torch.device) -> torch.cuda.Stream:
    """The lane's stream; None: a new stream of the whole device."""
    if lane is None:
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    assert isinstance(lane.stream, torch.cuda.Stream), f"the {lane.name} lane's stream is {lane.stream!r}"
    return lane.stream


@contextmanager
def cublas_carveout(idle_processors: int, bindings: Any = torch._C) -> Iterator[None]:
    """Let cuBLAS choose kernels for a device with idle_processors fewer processors.

    torch keeps that number for the whole process, so no other thread may compute products meanwhile. It reaches
    cuBLASLt alone, which plain products are given to meanwhile. Products of a torch without this setting are cut
    for the whole device: correct, but for more processors than there are.
    """
    choose = getattr(bindings, "_set_sm_carveout_experimental", None)
    if choose is None or not idle_processors:
        yield
        return
    library = bindings._get_blas_preferred_backend()
    choose(idle_processors)
    bindings._set_blas_preferred_backend(bindings._BlasBackend.Cublaslt)
    try:
        yield
    finally:
        choose(None)
        bindings._set_blas_preferred_backend(library)


def is_carved_out(bindings: Any = torch._C) -> bool:
    """Return whether cuBLAS chooses kernels for fewer processors than the device has; see cublas_carveout."""
    chosen = getattr(bindings, "_get_sm_carveout_experimental", None)
    return chosen is not None and chosen() is not None


class CudaDevice:
    """Accelerator by CUDA. device: as open_cuda returns it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def num_processors(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def host_numbers(self, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def upload(self, numbers: Tensor) -> Tensor:
        """torch reuses pinned memory only after the transfers that read it."""
        return numbers.to(self.device, non_blocking=True)

    def transfer(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def event(self) -> DeviceEvent:
        return CudaEvent(self.device)

    def graph_recorder(self, lane: DeviceLane | None = None) -> CudaGraphRecorder:
        idle = 0 if lane is None else self.num_processors - lane.num_processors
        return CudaGraphRecorder(self.device, lane, idle_processors=idle)

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def wide_product(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        return torch.mm(x, weight, out_dtype=torch.float32, out=out)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaFacts:
    """Facts that torch knows of CUDA on this machine.

    build: the CUDA version that torch was built for; None: built without. capabilities: (major, minor) by device.
    memory_bytes: by device.
    """

    build: str | None
    capabilities: tuple[tuple[int, int], ...]
    memory_bytes: tuple[int, ...] = ()


def cuda_facts() -> CudaFacts:
    """Asks torch, which asks the driver."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return CudaFacts(
        build=torch.version.cuda,
        capabilities=tuple(torch.cuda.get_device_capability(index) for index in range(count)),
        memory_bytes=tuple(torch.cuda.get_device_properties(index).total_memory for index in range(count)),
    )


def open_cuda(device: str, facts: CudaFacts, asked: str | None = None) -> torch.device:
    """The device of the name cuda or cuda:N, with its index.

    asked: how a message begins; None: with the flag of the device.
    Raises ConfigError that names what is missing: torch's CUDA build, a device, that device, its capability.
    """
    wanted = torch.device(device)
    assert wanted.type == "cuda", device
    asked = f"--device is {device}" if asked is None else asked
    if facts.build is None:
        raise ConfigError(f"{asked}; torch {torch.__version__} is built without CUDA")
    if not facts.capabilities:
        raise ConfigError(f"{asked}; torch finds no CUDA device (a driver for CUDA {facts.build}?)")
    index = wanted.index or 0
    if index >= len(facts.capabilities):
        raise ConfigError(f"{asked}; this machine has {len(facts.capabilities)} CUDA devices")
    if facts.capabilities[index] < LOWEST_CAPABILITY:
        have, need = (f"{major}.{minor}" for major, minor in (facts.capabilities[index], LOWEST_CAPABILITY))
        raise ConfigError(f"{asked}, of compute capability {have}; at least {need} is needed")
    return torch.device("cuda", index)


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
    """Memory of a CUDA device. The first call initialises CUDA on it, which takes some hundred MiB."""

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
