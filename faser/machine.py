"""What this process may use of the machine: cores and memory.

Reads the scheduler's affinity mask and the limits of control groups, version 1 and 2. A container's limits
count like the machine's own. Knows nothing of flags or models.
"""

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_PROC = Path("/proc")


def usable_cores(cgroup_root: Path = _CGROUP_ROOT, proc: Path = _PROC) -> int:
    """Cores this process may keep busy: its affinity mask, cut to its CPU quota.

    A quota is rounded down, and never below 1: with 2.5 cores, 2 threads are never throttled and 3 are.
    """
    cores = len(os.sched_getaffinity(0))
    quotas = [quota for folder in _cgroups(cgroup_root, proc, "cpu") if (quota := _cpu_quota(folder)) is not None]
    return max(1, min([cores, *(int(quota) for quota in quotas)]))


def usable_memory(cgroup_root: Path = _CGROUP_ROOT, proc: Path = _PROC) -> int:
    """Bytes this process may ever fill: the machine's memory, cut to the limits of its control groups."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = (limit for folder in _cgroups(cgroup_root, proc, "memory") if (limit := _memory_limit(folder)))
    return min([machine, *limits])


def available_memory(cgroup_root: Path = _CGROUP_ROOT, proc: Path = _PROC) -> int:
    """Bytes that are free now, or could be freed at once, within the same limits."""
    rooms = [usable_memory(cgroup_root, proc)]
    if (free_kib := _entry(proc / "meminfo", "MemAvailable:")) is not None:
        rooms.append(free_kib * 1024)
    for folder in _cgroups(cgroup_root, proc, "memory"):
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        if (limit := _memory_limit(folder)) is not None and used is not None:
            cached = _entry(folder / "memory.stat", "inactive_file") or 0
            rooms.append(limit - used + cached)
    return max(0, min(rooms))


def _cgroups(root: Path, proc: Path, controller: str) -> Iterator[Path]:
    """Folders whose limits hold for this process: its own groups and all above them, in both versions.

    Inside a container the path in /proc may be the host's; folders that do not exist have no say.
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
    """Cores' worth of time a group may use, None where it is not limited."""
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
    """The number behind a key in a file of "key number …" lines."""
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
