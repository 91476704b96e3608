"""Cores and memory, against control groups drawn in a folder."""

import os
from pathlib import Path

import pytest

from faser.machine import available_memory, usable_cores, usable_memory

CORES = len(os.sched_getaffinity(0))
MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def machine(root: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    """(cgroup root, proc) of a machine on which we belong to the groups of `membership`."""
    for name, text in files.items():
        path = root / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(membership)
    return root / "cgroup", root / "proc"


@pytest.mark.parametrize(
    "membership, files, cores",
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, CORES),
        ("0::/\n", {"cpu.max": "100000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "20000 100000\n"}, 1),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "100000 100000\n"}, 1),
        ("0::/../elsewhere\n", {"cpu.max": "100000 100000\n"}, 1),
        (
            "3:cpu,cpuacct:/a\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "-1", "cpu,cpuacct/a/cpu.cfs_period_us": "5"},
            CORES,
        ),
        ("3:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "100000", "cpu/a/cpu.cfs_period_us": "100000"}, 1),
        ("2:memory:/\n", {"cpu.cfs_quota_us": "100000", "cpu.cfs_period_us": "100000"}, CORES),
    ],
)
def test_cores_are_the_affinity_mask_cut_to_the_quota(
    tmp_path: Path, membership: str, files: dict[str, str], cores: int
) -> None:
    assert usable_cores(*machine(tmp_path, membership, files)) == cores


def test_without_control_groups_the_machine_is_ours(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, tmp_path) == CORES
    assert usable_memory(tmp_path, tmp_path) == MEMORY


@pytest.mark.parametrize(
    "membership, files, memory",
    [
        ("0::/a\n", {"a/memory.max": "max\n", "memory.max": "1048576\n"}, 1 << 20),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "2097152\n"}, 2 << 20),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "9223372036854771712\n"}, MEMORY),
    ],
)
def test_memory_is_cut_to_the_tightest_limit(
    tmp_path: Path, membership: str, files: dict[str, str], memory: int
) -> None:
    assert usable_memory(*machine(tmp_path, membership, files)) == memory


def test_free_memory_is_what_the_limit_leaves_with_the_page_cache_given_back(tmp_path: Path) -> None:
    files = {
        "memory.max": "1000000",
        "memory.current": "700000",
        "memory.stat": "anon 500000\ninactive_file 100000\nactive_file 100000\n",
    }
    cgroup, proc = machine(tmp_path, "0::/\n", files)
    assert available_memory(cgroup, proc) == 400000
    (proc / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable:   300 kB\n")
    assert available_memory(cgroup, proc) == 300 * 1024
