"""Backends on given cores: the same bits, threads where they belong, and two instances side by side.

Bugs these tests have been seen to catch are named where they are caught.
"""

import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from faser.errors import ConfigError
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.cpu.library import LanePools, NativePool
from faser.kernels.interface.shapes import DeviceLane
from faser.kernels.torch_backend import TorchBackend
from tests.kernels.layouts import Span, attention_shape, kv_shape, layout_of, qkv_width, shuffled_table, step
from tests.waiting import until

pytestmark = pytest.mark.alone

USABLE = sorted(os.sched_getaffinity(0))
two_cores = pytest.mark.skipif(len(USABLE) < 2, reason="needs two cores")


@pytest.fixture
def backend(kernel_cache: Path) -> NativeBackend:
    """Of two threads, and new: its lanes are not made yet."""
    torch.manual_seed(0)
    return NativeBackend(library_path(cache_dir=kernel_cache), num_threads=2)


def tasks() -> set[int]:
    """Threads of this process, by the system's numbers."""
    return {int(name) for name in os.listdir("/proc/self/task")}


def every_kernel(backend: NativeBackend, rows: int) -> list[Tensor]:
    """Results of all kernels that compute, from seeded inputs."""
    torch.manual_seed(1)
    shape = attention_shape(2, 2, 32)
    x, ids = torch.randn(rows, 96), torch.randint(0, 300, (rows,))
    packed = backend.pack(torch.randn(300, 96))
    table = shuffled_table(1, 40, seed=0)
    cache = backend.allocate_kv(kv_shape(shape, table.numel(), torch.float32))
    qkv = torch.randn(rows, qkv_width(shape))
    attended = step(backend, cache, shape, layout_of([Span(sequence=0, start=0, rows=rows)], table), qkv)
    return [
        backend.linear(x, packed, torch.empty(rows, 300)),
        backend.embed(ids, packed, torch.empty(rows, 96)),
        backend.rms_norm(x, torch.ones(96), 1e-6, torch.empty(rows, 96)),
        backend.gate(x, torch.empty(rows, 48)),
        attended,
        torch.from_numpy(backend.sampling_kernels.best(x)),
    ]


@two_cores
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_every_set_of_cores_gives_the_bits_of_the_full_width(backend: NativeBackend, rows: int) -> None:
    wanted = every_kernel(backend, rows)
    first, second = USABLE[:2]
    for cores in ((first,), (second,), (first, second), (second, first), None):
        backend.use(cores)
        for ours, theirs in zip(every_kernel(backend, rows), wanted, strict=True):
            assert torch.equal(ours, theirs), cores


@two_cores
def test_every_thread_but_the_callers_is_on_its_core(backend: NativeBackend) -> None:
    for cores in (tuple(USABLE), tuple(reversed(USABLE))):
        before = tasks()
        backend.use(cores)
        placed = [os.sched_getaffinity(each) for each in sorted(tasks() - before)]
        assert sorted(map(sorted, placed)) == sorted([core] for core in cores[1:])
        assert os.sched_getaffinity(0) == set(USABLE), "the caller's thread is the caller's"


@two_cores
def test_a_lane_of_one_core_has_no_thread_of_its_own(backend: NativeBackend) -> None:
    before = tasks()
    backend.use((USABLE[1],))
    every_kernel(backend, 3)
    assert tasks() == before


@two_cores
def test_the_full_width_stays_where_the_system_likes_it(kernel_cache: Path) -> None:
    before = tasks()
    backend = NativeBackend(library_path(cache_dir=kernel_cache), num_threads=3)
    made = tasks() - before
    backend.use((USABLE[0],))
    backend.use(None)
    assert [os.sched_getaffinity(each) for each in made] == [set(USABLE)] * 2


@two_cores
def test_a_set_of_cores_is_made_once(backend: NativeBackend) -> None:
    backend.use(tuple(USABLE))
    made = tasks()
    for _ in range(20):
        backend.use(None)
        backend.use(tuple(USABLE))
    assert tasks() == made


@pytest.mark.parametrize("cores", [(), (0, 0), (max(USABLE) + 1,), (-1,)])
def test_cores_that_cannot_be_used_are_refused_with_those_that_can(
    backend: NativeBackend, cores: tuple[int, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        backend.use(cores)
    assert str(list(cores)) in str(caught.value)
    assert str(USABLE) in str(caught.value)
    every_kernel(backend, 2)  # goes on as before


@two_cores
def test_idle_threads_of_the_full_width_leave_their_cores_when_a_lane_takes_over(kernel_cache: Path) -> None:
    """They spin for 200 µs after a job otherwise. Counted in time on a core, which other programs never lengthen.

    Caught, where the machine has a core to spare: a pool that is not asked to rest, and one that does not listen.
    """
    known = tasks()
    backend = NativeBackend(library_path(cache_dir=kernel_cache), num_threads=2)
    (worker,) = tasks() - known
    packed = backend.pack(torch.randn(512, 512))
    x, out = torch.randn(64, 512), torch.empty(64, 512)
    times = []
    for _ in range(300):
        backend.use(None)
        for _ in range(3):
            backend.linear(x, packed, out)
        if asleep(worker):
            continue  # it never got to this job
        began = on_core_s(worker)
        backend.use((USABLE[0],))
        while not asleep(worker):
            time.sleep(0.0005)
        times.append(on_core_s(worker) - began)
        if len(times) == 40:
            break
    assert not times or sorted(times)[len(times) // 4] < 80e-6, sorted(times)


def on_core_s(task: int) -> float:
    """Time a thread has had a core. Linux makes the number of such a clock out of the thread's."""
    return time.clock_gettime((~task << 3) | 6)


def asleep(task: int) -> bool:
    return Path(f"/proc/self/task/{task}/stat").read_text().rpartition(")")[2].split()[0] == "S"


@two_cores
def test_two_instances_compute_side_by_side(backend: NativeBackend) -> None:
    """Each on a core of its own, with the choice of tokens. Caught: a choice that stays on the shared threads."""
    other = backend.concurrent_instance()
    jobs = []
    for each in (backend, other):
        x = torch.randn(40, 256)
        packed = each.pack(torch.randn(384, 256))
        logits = torch.randn(64, 4096)
        wanted = each.linear(x, packed, torch.empty(40, 384)), each.sampling_kernels.best(logits)
        jobs.append((each, x, packed, logits, wanted))
    wrong: list[str] = []

    def run(at: int) -> None:
        each, x, packed, logits, (product, best) = jobs[at]
        each.use((USABLE[at],))
        out = torch.empty(40, 384)
        for _ in range(300):
            if not torch.equal(each.linear(x, packed, out), product):
                wrong.append(f"product of {at}")
            if (each.sampling_kernels.best(logits) != best).any():
                wrong.append(f"choice of {at}")

    threads = [threading.Thread(target=run, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_an_instance_next_to_another_shares_its_threads_and_its_handles(backend: NativeBackend) -> None:
    """Caught: threads that end with the first instance."""
    packed = backend.pack(torch.randn(64, 32))
    x = torch.randn(9, 32)
    wanted = backend.linear(x, packed, torch.empty(9, 64))
    before = tasks()
    other = backend.concurrent_instance()
    assert tasks() == before
    del backend
    assert torch.equal(other.linear(x, packed, torch.empty(9, 64)), wanted)


@two_cores
def test_threads_end_with_their_backend(kernel_cache: Path) -> None:
    before = len(tasks())
    for _ in range(5):
        backend = NativeBackend(library_path(cache_dir=kernel_cache), num_threads=2)
        backend.use(tuple(USABLE))
        assert len(tasks()) == before + 1 + len(USABLE) - 1
        del backend
        until(lambda: len(tasks()) == before)


class FakeLibrary:
    """Pools without threads. alive: addresses of those not freed."""

    def __init__(self) -> None:
        self.made = 0
        self.alive: set[int] = set()

    def faser_pool_on(self, _cores: int, _num_cores: int) -> int:
        self.made += 1
        self.alive.add(self.made)
        return self.made

    def faser_pool_rest(self, address: int) -> None:
        assert address in self.alive | {1000}

    def faser_pool_free(self, address: int) -> None:
        self.alive.discard(address)


def test_few_pools_are_kept_and_the_one_in_use_always() -> None:
    fake = FakeLibrary()
    library = cast(ctypes.CDLL, fake)
    pools = LanePools(library, NativePool(1000, library), frozenset(range(64)))
    for core in range(64):
        pools.use((core,))
        assert pools.address in fake.alive
        assert len(fake.alive) <= 9
    address = pools.address
    pools.use((63,))
    assert pools.address == address
    assert fake.made == 64


def test_a_pool_that_the_system_refuses_is_an_error() -> None:
    class Refuses(FakeLibrary):
        def faser_pool_on(self, _cores: int, _num_cores: int) -> int:
            return 0

    library = cast(ctypes.CDLL, Refuses())
    pools = LanePools(library, NativePool(1000, library), frozenset(range(4)))
    with pytest.raises(ConfigError, match=r"cores \[2, 3\]"):
        pools.use((2, 3))
    pools.use(None)
    assert pools.address == 1000


@two_cores
def test_torch_has_its_width_per_thread() -> None:
    """A lane's width is nobody else's, and None brings the old one back."""
    here = torch.get_num_threads()
    torch.set_num_threads(2)
    seen: list[int] = []

    def lane(backend: TorchBackend) -> None:
        backend.use((USABLE[0],))
        seen.append(torch.get_num_threads())
        backend.use(None)
        seen.append(torch.get_num_threads())

    try:
        thread = threading.Thread(target=lane, args=(TorchBackend().concurrent_instance(),))
        thread.start()
        thread.join()
        seen.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(here)
    assert seen == [1, 2, 2]


FORKS = """
import os, sys, warnings
import torch
from pathlib import Path
from faser.engine.execution.overlap.partition import Cores
from faser.engine.execution.overlap.partition import synchronous
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path

warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons advise against what is tested here
cores = tuple(sorted(os.sched_getaffinity(0)))
backend = NativeBackend(library_path(cache_dir=Path(sys.argv[1])), num_threads=2)
backend.use(cores)
lanes = Cores(cores)
lanes.run_both(lambda lane, done: None, synchronous(lambda lane: None))
child = os.fork()
if child == 0:
    joined = lanes.run_both(lambda lane, done: os.getpid(), synchronous(lambda lane: os.getpid()))
    assert joined.drafted == joined.verified == os.getpid()
    del backend
    lanes.close()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


@two_cores
def test_a_forked_child_has_lanes_of_its_own_and_both_exit_without_closing(kernel_cache: Path) -> None:
    """Caught: a child that waits for the end of threads which stayed in its parent."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(kernel_cache)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_lane_of_a_gpu_is_refused(backend: NativeBackend) -> None:
    place = DeviceLane(name="draft", share=0.25, num_processors=36, stream=None)
    with pytest.raises(ConfigError, match="computes on cpu; it cannot use the draft lane of a GPU"):
        backend.use(place)
