"""A GPU that is a clock: work takes the time that it is said to take on its stream, and nobody computes.

The host's side is real, but for the driver: a call of it costs the calling thread what it is said to cost, spun
away in C without the interpreter's lock, as torch gives it up there. Planning attention keeps the lock, as
FlashInfer's call does. Calls of the driver are guesses of the order that such calls are known to have. The Python
of FlashInfer's `plan` and its compiled planner were timed on a core of an AMD EPYC, on a stand-in of the CUDA
runtime (tests/kernels/cuda/flashinfer/planner.py): 17 to 24 and 2 to 4 microseconds.
"""

import ctypes
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from faser.kernels.cpu.build import COMPILERS, find_compiler
from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
from faser.kernels.cuda.flashinfer.device_kernels import DeviceKernels
from faser.kernels.cuda.flashinfer.library import planning_wrapper

COPY_CALL_S, EVENT_CALL_S, QUERY_CALL_S, REPLAY_CALL_S = 4e-6, 1.5e-6, 1e-6, 12e-6
PYTHON_PLAN_S, PLANNER_S = 18e-6, 3e-6
_COPY_S, _SMALL_S = 2e-6, 60e-6  # on the device: a copy; the head or the choice of a step
_BLOCKS = 33  # that run at the same time, of each of eight KV heads
_TOKEN, _LEAD = 7, 5.0  # that everybody chooses, so that every draft is right
_SPIN = """
#include <time.h>
extern "C" void spin_until(double until_s) {
    timespec now;
    do clock_gettime(CLOCK_MONOTONIC, &now); while (now.tv_sec + 1e-9 * now.tv_nsec < until_s);
}
"""


@cache
def _spin_until() -> Callable[[float], None]:
    """Wait in C until time.perf_counter says so."""
    compiler = find_compiler(COMPILERS)
    assert compiler is not None, f"this takes one of {', '.join(COMPILERS)}"
    folder = Path(tempfile.mkdtemp())
    source, library = folder / "spin.cpp", folder / "spin.so"
    source.write_text(_SPIN, "utf-8")
    subprocess.run([compiler, "-O2", "-fPIC", "-shared", "-o", library, source], check=True)
    call = ctypes.CDLL(str(library)).spin_until
    call.argtypes, call.restype = [ctypes.c_double], None
    shutil.rmtree(folder)
    return call


def _driver_call(seconds: float) -> None:
    _spin_until()(time.perf_counter() + seconds)


@dataclass(eq=False)
class ClockStream:
    """free_s: when all that was given to it is done. busy_s: how long it worked. first_s: when work first came."""

    free_s: float = 0.0
    busy_s: float = 0.0


@dataclass
class ClockGpu:
    """An Accelerator and a LaneDevice. trunk_s: seconds of a trunk, by how many query heads its model has."""

    trunk_s: dict[int, float]
    num_processors: int = 132
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    default: ClockStream = field(default_factory=ClockStream)
    streams: list[ClockStream] = field(default_factory=list)
    seen_heads: int = 0  # of the last attention that was run
    num_plans: int = 0  # that compiled planners have made
    waited_s: dict[int, float] = field(
        default_factory=dict
    )  # before a trunk, since the work before it, by its heads
    worked_until_s: float = 0.0  # the last graph, of whatever stream
    _local: threading.local = field(default_factory=threading.local)

    @property
    def current(self) -> ClockStream:
        """The calling thread's."""
        found: ClockStream = getattr(self._local, "stream", self.default)
        return found

    def give(self, seconds: float) -> None:
        """Work for the current stream."""
        stream = self.current
        stream.free_s = max(stream.free_s, time.perf_counter()) + seconds
        stream.busy_s += seconds

    def stream(self, priority: int) -> ClockStream:
        self.streams.append(ClockStream())
        return self.streams[-1]

    def adopt(self, address: int) -> ClockStream:
        return self.stream(address)

    @contextmanager
    def on(self, stream: object) -> Iterator[None]:
        before = self.current
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def event(self) -> "ClockEvent":
        return ClockEvent(self)

    def elapsed_s(self, earlier: Any, later: Any) -> float:
        found: float = later.at_s - earlier.at_s
        return found

    def wait(self) -> None:
        for stream in (self.default, *self.streams):
            _spin_until()(stream.free_s)

    def host_numbers(self, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(count, dtype=dtype)

    def upload(self, numbers: Tensor) -> Tensor:
        _driver_call(COPY_CALL_S)
        self.give(_COPY_S)
        return numbers.clone()

    def transfer(self, source: Tensor, target: Tensor) -> None:
        _driver_call(COPY_CALL_S)
        self.give(_COPY_S)
        target.copy_(source)

    def graph_recorder(self, lane: object = None) -> "ClockGraphRecorder":
        return ClockGraphRecorder(self)

    def wide_product(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        return out


@dataclass
class ClockEvent:
    """Event of a device that is a clock."""

    owner: ClockGpu
    at_s: float = 0.0

    def record(self) -> None:
        _driver_call(EVENT_CALL_S)
        self.at_s = max(self.owner.current.free_s, time.perf_counter())

    def hold_stream(self) -> None:
        _driver_call(EVENT_CALL_S)
        stream = self.owner.current
        stream.free_s = max(stream.free_s, self.at_s)

    def query(self) -> bool:
        _driver_call(QUERY_CALL_S)
        return time.perf_counter() >= self.at_s

    def synchronize(self) -> None:
        _spin_until()(self.at_s)


@dataclass
class ClockGraphRecorder:
    """Runs what it records once, to see whether there is attention in it."""

    owner: ClockGpu
    graph_bytes: int = 0

    def capture(self, work: Callable[[], None]) -> "ClockGraph":
        self.owner.seen_heads = 0
        work()
        return ClockGraph(self.owner, self.owner.seen_heads)


@dataclass
class ClockGraph:
    owner: ClockGpu
    heads: int  # of the attention in it; 0: none, it is no trunk

    def replay(self) -> None:
        _driver_call(REPLAY_CALL_S)
        gpu = self.owner
        if self.heads:
            begins_s = max(gpu.current.free_s, time.perf_counter())
            waited_s = max(0.0, begins_s - gpu.worked_until_s)
            gpu.waited_s[self.heads] = gpu.waited_s.get(self.heads, 0.0) + waited_s
        gpu.give(gpu.trunk_s.get(self.heads, _SMALL_S))
        gpu.worked_until_s = gpu.current.free_s


def _hold_lock(seconds: float, began_s: float) -> None:
    """Compute until this long after began_s, as Python and the planner do."""
    ends_s = began_s + seconds
    while time.perf_counter() < ends_s:
        pass


class _Attention:
    """A wrapper. Its plan copies three to five arrays and calls the planner."""

    left_out_blocks: int  # planning_wrapper adds it

    def __init__(self, owner: ClockGpu, num_copies: int) -> None:
        self.owner = owner
        self._num_copies = num_copies
        self._cached_module: Any = None
        self._pinned = torch.zeros(64, dtype=torch.uint8)

    def plan(self, **options: Any) -> None:
        _hold_lock(PYTHON_PLAN_S, time.perf_counter())
        for _ in range(self._num_copies):
            _driver_call(COPY_CALL_S)
            self.owner.give(_COPY_S)
        self._cached_module = _Planner(self.owner)
        page_starts = options.get("paged_kv_indptr", options.get("indptr"))
        rows = options.get("qo_indptr", page_starts)
        layout, not_read = (rows, page_starts, options["seq_lens"]), [0] * 11
        self._cached_module.plan("floats", "numbers", self._pinned, *layout, *not_read, False, 0, 0)

    def reset_workspace_buffer(self, *_: Tensor, **__: Tensor) -> None:
        pass

    def run(self, *, q: Tensor, out: Tensor, **options: Any) -> Tensor:
        self.owner.seen_heads = q.shape[1]
        return out


@dataclass
class _Planner:
    """A compiled module: pieces of sequences are as long as those of eight KV heads on 132 processors."""

    owner: ClockGpu

    def plan(
        self, _floats: str, _numbers: str, pinned: Tensor, _rows: Tensor, page_starts: Tensor, *_: Any
    ) -> list[int]:
        began_s = time.perf_counter()
        pages = np.diff(page_starts.numpy())
        most = max(_BLOCKS, len(pages) + _BLOCKS // 2)
        low, high = 8, max(int(pages.max()), 8)
        while low < high:
            chunk = (low + high) // 2
            low, high = (chunk + 1, high) if (-(-pages // chunk)).sum() > most else (low, chunk)
        pinned.numpy()[:4].view("int32")[0] = 16 * low
        self.owner.num_plans += 1
        _hold_lock(PLANNER_S, began_s)
        _driver_call(COPY_CALL_S)
        self.owner.give(_COPY_S)
        return [0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]


@dataclass
class _Library:
    """FlashInfer without its arithmetic: nothing is computed."""

    owner: ClockGpu

    def BatchPrefillWithPagedKVCacheWrapper(self, **options: Any) -> _Attention:
        return _made(self.owner, 5)

    def BatchDecodeWithPagedKVCacheWrapper(self, **options: Any) -> _Attention:
        return _made(self.owner, 3)


def _made(owner: ClockGpu, num_copies: int) -> _Attention:
    """A wrapper whose planner FASER can call."""
    found: _Attention = planning_wrapper(_Attention)(owner, num_copies)
    return found


class _Choice:
    """Sampling kernels that choose the same token everywhere."""

    def take(self, logits: Tensor, rows: object, chosen: Tensor, **options: bool) -> None:
        chosen.fill_(_TOKEN)

    def draft(self, logits: Tensor, rows: object, chosen: Tensor, margins: Tensor, **options: bool) -> None:
        chosen.fill_(_TOKEN)
        margins.fill_(_LEAD)


def clock_backend(gpu: ClockGpu) -> FlashInferBackend:
    """The backend of a GPU, on a clock."""
    nothing: Any = None
    kernels = DeviceKernels(
        rms_norm=lambda _x, _weight, _eps, out, _residual: out,
        gate=lambda _gate_up, out, _activation: out,
        rope_append=lambda qkv, _angles, _positions, _slots, _keys, _values, shape, *_norms: qkv[
            :, : shape.num_heads * shape.head_dim
        ],
        scale_by_sinks=lambda *_: None,
        match=lambda *_: None,
        advance=lambda *_: None,
        sampling_kernels=lambda *_: nothing,
        device_sampling_kernels=lambda _rows, _width: _Choice(),
    )
    return FlashInferBackend(gpu, _Library(gpu), kernels)
