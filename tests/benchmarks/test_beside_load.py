"""Real processes: they are busy while the block runs, and gone when it is over or their parent is."""

import contextlib
import signal
import subprocess
import sys
import time

import psutil

from benchmarks.runner import beside_load

_PARENT = """
import sys, time
from benchmarks.runner import beside_load
with beside_load(1):
    print("busy", flush=True)
    time.sleep(60)
"""


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def test_busy_processes_of_normal_priority_run_as_long_as_the_block_even_if_it_fails() -> None:
    before = _children()
    with contextlib.suppress(KeyError), beside_load(2):
        busy = _children() - before
        assert len(busy) == 2
        assert {process.nice() for process in busy} == {psutil.Process().nice()}
        time.sleep(0.5)
        assert sum(process.cpu_times().user for process in busy) > 0.1
        raise KeyError

    assert not [process for process in busy if process.is_running()]


def test_no_process_is_started_where_none_is_wanted() -> None:
    before = _children()
    with beside_load(0):
        assert _children() == before


def test_a_busy_process_ends_by_itself_when_its_parent_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"busy\n"
        (busy,) = psutil.Process(parent.pid).children()
        parent.send_signal(signal.SIGKILL)
    busy.wait(10)
