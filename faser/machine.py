"""Cores and memory that this process may use.

Reads the scheduler's affinity mask and the limits of control groups, version 1 and 2, so that the limits of a
container count like the machine's own.
"""

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_PROC = Path("/proc")


def usable_cores(cgroup_root: Path = _CGROUP_ROOT, proc: Path = _PROC) -> int:
    """Cores that this process may keep busy: those of its affinity mask, at most its CPU quota.

    A quota is rounded down, but not below 1: with 2.5 cores, 2 threads are never throttled and 3 are.
    """
    cores = len(os.sched_getaffinity(0))
    quotas = [quota for folder in _cgroups(cgroup_root, proc, "cpu") if (quota := _cpu_quota(folder)) is not None]
    return max(1, min([cores, *(int(quota) for quota in quotas)]))


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
