"""Cores and memory, against control groups drawn in a folder."""

import os
from pathlib import Path

import psutil
import pytest

from faser.machine import (
    BusyMeter,
    CoreUse,
    available_memory,
    core_shares,
    core_use,
    return_free_memory,
    usable_cores,
    usable_memory,
)

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


def proc_of(root: Path, stat: str, threads: dict[str, str]) -> Path:
    """A /proc with this first line of /proc/stat, and the schedstat of every thread."""
    for number, schedstat in threads.items():
        (root / "self/task" / number).mkdir(parents=True)
        (root / "self/task" / number / "schedstat").write_text(schedstat)
    (root / "stat").write_text(stat)
    return root


def test_the_use_of_cores_is_that_of_all_threads_and_of_all_processes(tmp_path: Path) -> None:
    ticks = [each * os.sysconf("SC_CLK_TCK") for each in (3, 1, 4, 20, 2, 1, 1, 8, 3, 0)]
    stat = f"cpu  {' '.join(map(str, ticks))}\ncpu0 1 1 1 1\n"
    proc = proc_of(tmp_path, stat, {"7": "2500000000 500000000 9\n", "8": "1000000000 250000000 3\n"})
    (proc / "self/task/9").mkdir()  # a thread that has just ended
    assert core_use(proc) == CoreUse(ran_s=3.5, waited_s=0.75, used_s=10.0, total_s=40.0)


@pytest.mark.parametrize("stat", ["", "cpu 1 2 3\n", "cpu a b c d e f g h\n", "intr 1 2 3 4 5 6 7 8\n"])
def test_a_kernel_that_says_something_else_says_nothing(tmp_path: Path, stat: str) -> None:
    assert core_use(proc_of(tmp_path, stat, {"7": "1 1 1\n"})) is None


def test_without_proc_nothing_is_known_and_the_machine_counts_as_quiet(tmp_path: Path) -> None:
    meter = BusyMeter(lambda: core_use(tmp_path / "none"))
    with meter.watch():
        pass
    assert meter.share == 0.0


@pytest.mark.parametrize(
    "ran_s, waited_s, used_s, share",
    [
        (4.0, 4.0, 12.0, 0.5),  # half the time for us
        (4.0, 4.0, 5.0, 0.0625),  # our threads mostly waited for each other
        (4.0, 0.0, 16.0, 0.0),  # others use three quarters of the cores, and we never wait
        (0.0, 0.0, 16.0, 0.0),
        (4.0, 4.0, 3.9, 0.0),  # ticks are coarse
    ],
)
def test_others_are_busy_where_we_wait_and_they_run(
    ran_s: float, waited_s: float, used_s: float, share: float
) -> None:
    start = CoreUse(ran_s=100.0, waited_s=50.0, used_s=1000.0, total_s=9000.0)
    end = CoreUse(ran_s=100.0 + ran_s, waited_s=50.0 + waited_s, used_s=1000.0 + used_s, total_s=9016.0)
    quiet = CoreUse(ran_s=101.0 + ran_s, waited_s=50.0 + waited_s, used_s=1001.0 + used_s, total_s=9018.0)
    reads = iter([start, end, end, quiet])
    meter = BusyMeter(lambda: next(reads))
    for _ in range(2):
        with meter.watch():
            pass
    assert meter.share == pytest.approx(share)


def test_this_kernel_says_what_this_process_used() -> None:
    before = core_use()
    assert before is not None
    sum(range(5_000_000))
    after = core_use()
    assert after is not None
    assert after.ran_s > before.ran_s


def test_memory_that_was_freed_between_pieces_in_use_goes_back() -> None:
    """The last piece stays in use, so the C library does not give back what lies before it by itself."""
    process = psutil.Process()
    pieces = [bytearray(1 << 16) for _ in range(2000)]  # 131 MB, each piece below what is mapped by itself
    for piece in pieces:
        piece[:] = b"x" * len(piece)
    in_use = process.memory_info().rss
    last = pieces[-1]
    del pieces, piece
    return_free_memory()
    assert in_use - process.memory_info().rss > 100e6
    assert last[0] == ord("x")


@pytest.mark.parametrize(
    "count, expected",
    [
        (1, [(0, 1, 4, 5, 2, 3)]),
        (2, [(0, 1, 4), (5, 2, 3)]),
        (3, [(0, 1), (4, 5), (2, 3)]),
        (8, [(0,), (1,), (4,), (5,), (2,), (3,), (0,), (1,)]),
    ],
)
def test_cores_are_shared_out_node_by_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, expected: list[tuple[int, ...]]
) -> None:
    """Two nodes; core 6 exists and may not be used."""
    for node, cores in (("node0", "0-1,4-5"), ("node1", "2-3,6")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cores + "\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5})
    assert core_shares(count, tmp_path) == expected
    assert core_shares(2, tmp_path / "nowhere") == [(0, 1, 2), (3, 4, 5)]
