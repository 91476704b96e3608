"""Cores and memory that this process may use and gives back, and how busy other processes keep the cores.

Reads the scheduler's affinity mask and the limits of control groups, version 1 and 2, so that the limits of a
container count like the machine's own.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from faser.optional import present

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_PROC = Path("/proc")
_DEV = Path("/dev")
_NODES = Path("/sys/devices/system/node")
_GPU_NODES = ("nvidia*", "nvgpu*", "nvhost*", "nvmap", "dxg", "kfd")  # of drivers that torch computes with


def usable_cores(cgroup_root: Path = _CGROUP_ROOT, proc: Path = _PROC) -> int:
    """Cores that this process may keep busy: those of its affinity mask, at most its CPU quota.

    A quota is rounded down, but not below 1: with 2.5 cores, 2 threads are never throttled and 3 are.
    """
    cores = len(os.sched_getaffinity(0))
    quotas = present(map(_cpu_quota, _cgroups(cgroup_root, proc, "cpu")))
    return max(1, min([cores, *(int(quota) for quota in quotas)]))


def core_shares(count: int, nodes: Path = _NODES) -> list[tuple[int, ...]]:
    """The cores that this process may use, in `count` parts; a part lies on as few NUMA nodes as can be.

    With more parts than cores several parts are the same core.
    """
    usable = os.sched_getaffinity(0)
    by_node = [sorted(usable & cores) for cores in _cores_of_nodes(nodes)]
    cores = [core for each in by_node for core in each] or sorted(usable)
    if count > len(cores):
        return [(cores[part % len(cores)],) for part in range(count)]
    return [tuple(cores[part * len(cores) // count : (part + 1) * len(cores) // count]) for part in range(count)]


def _cores_of_nodes(nodes: Path) -> list[set[int]]:
    found = []
    for path in sorted(nodes.glob("node[0-9]*"), key=lambda each: int(each.name.removeprefix("node"))):
        listed = (path / "cpulist").read_text(encoding="utf-8").strip()
        ranges = (part.partition("-") for part in listed.split(",") if part)
        found.append({core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)})
    return found


def usable_memory(cgroup_root: Path = _CGROUP_ROOT, proc: Path = _PROC) -> int:
    """Bytes that this process may ever use: the machine's memory, at most the limits of its control groups."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (limit for folder in _cgroups(cgroup_root, proc, "memory") if (limit := _memory_limit(folder)))
    return min([machine, *limits])


def available_memory(cgroup_root: Path = _CGROUP_ROOT, proc: Path = _PROC) -> int:
    """Bytes that are free, or can be freed at once, within the same limits."""
    limits = [usable_memory(cgroup_root, proc)]
    if (free_kib := _entry(proc / "meminfo", "MemAvailable:")) is not None:
        limits.append(free_kib * 1024)
    for folder in _cgroups(cgroup_root, proc, "memory"):
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        if (limit := _memory_limit(folder)) is not None and used is not None:
            cached = _entry(folder / "memory.stat", "inactive_file") or 0
            limits.append(limit - used + cached)
    return max(0, min(limits))


def return_free_memory() -> None:
    """Give memory that this process has freed back to the system; any thread may call it.

    The C library keeps it otherwise, in pieces between others in use. Does nothing unless the library is glibc.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


def may_have_gpu(dev: Path = _DEV) -> bool:
    """Return whether a GPU's driver has a device file. Without one torch finds no GPU; with one it may not."""
    return any(list(dev.glob(pattern)) for pattern in _GPU_NODES)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreUse:
    """Seconds since some fixed time. ran_s, waited_s: all threads of this process ran, or waited for a core.

    used_s, total_s: what all processes used of all cores, and what there was.
    """

    ran_s: float
    waited_s: float
    used_s: float
    total_s: float


def core_use(proc: Path = _PROC) -> CoreUse | None:
    """None where the kernel does not say, as on any other than Linux."""
    ran_ns = waited_ns = 0
    try:
        for thread in (proc / "self/task").iterdir():
            try:
                ran, waited, *_ = (thread / "schedstat").read_text().split()
            except FileNotFoundError:  # the thread has ended meanwhile
                continue
            ran_ns, waited_ns = ran_ns + int(ran), waited_ns + int(waited)
        name, *ticks = (proc / "stat").read_text().partition("\n")[0].split()
        user, nice, system, idle, iowait, irq, softirq, steal = map(int, ticks[:8])
    except (OSError, ValueError):
        return None
    if name != "cpu":
        return None
    used = user + nice + system + irq + softirq
    ticks_s = 1 / os.sysconf("SC_CLK_TCK")
    return CoreUse(
        ran_s=ran_ns / 1e9,
        waited_s=waited_ns / 1e9,
        used_s=used * ticks_s,
        total_s=(used + idle + iowait + steal) * ticks_s,
    )


class BusyMeter:
    """Meter of how busy other processes kept the cores while this one worked.

    share: 0 … 1, the largest of all stretches that were watched; 0 where the kernel does not say. Of a stretch it
    is the part for which this process's threads waited for a core, at most the part of the cores that others used:
    processes that leave cores free disturb nothing, and threads may also wait for each other.
    """

    def __init__(self, read: Callable[[], CoreUse | None] = core_use) -> None:
        self._read = read
        self.share = 0.0

    @contextmanager
    def watch(self) -> Iterator[None]:
        before = self._read()
        yield
        after = self._read()
        if before is not None and after is not None:
            self.share = max(self.share, _busy_share(before, after))


def _busy_share(before: CoreUse, after: CoreUse) -> float:
    ran_s, waited_s = after.ran_s - before.ran_s, after.waited_s - before.waited_s
    used_s, total_s = after.used_s - before.used_s, after.total_s - before.total_s
    if ran_s <= 0 or waited_s <= 0 or total_s <= 0:
        return 0.0
    return max(min(waited_s / (ran_s + waited_s), (used_s - ran_s) / total_s), 0.0)


@cache
def _malloc_trim() -> Any:
    """glibc's function; None: the C library is another one."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def _cgroups(root: Path, proc: Path, controller: str) -> Iterator[Path]:
    """Folders whose limits hold for this process: its own groups and all above them, in both versions.

    In a container the path in /proc may be the host's; a folder that does not exist sets no limit.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            bases = [root, root / "unified"]
        elif controller in controllers.split(","):
            bases = [root / controllers, root / controller]
        else:
            continue
        group = Path(path.lstrip("/"))
        for base in bases:
            yield from (base / part for part in (group, *group.parents))


def _cpu_quota(folder: Path) -> float | None:
    """Cores that a group may keep busy; None where there is no limit."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    if quota_us is None or period_us is None or quota_us < 0 or period_us <= 0:
        return None
    return quota_us / period_us


def _memory_limit(folder: Path) -> int | None:
    limit = _number(folder / "memory.max")
    return _number(folder / "memory.limit_in_bytes") if limit is None else limit


def _entry(file: Path, key: str) -> int | None:
    """The number after a key in a file of "key number …" lines."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [key]), None)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
