"""Processes that end with the one that started them, however that one ends.

A run on a lent machine may be killed at any moment. A process that outlives it would keep the device's memory from
the next run.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_TICK_S = 5.0


def die_with_parent() -> None:
    """To be called in a new process: the kernel kills it when its parent's starting thread ends. Linux only."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def run_child(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    timeout_s: float,
    tick: Callable[[], None] = lambda: None,
    folder: Path | None = None,
) -> int | None:
    """Run a program; its exit status, or None where it was killed, with all it started, after timeout_s.

    What it prints goes to log, which is written anew. tick: called every few seconds while it runs.
    """
    with log.open("wb") as out:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=folder,
            process_group=0,
            preexec_fn=die_with_parent,
        )
        try:
            return _wait(child, timeout_s, tick)
        finally:
            _kill_group(child)


def _wait(child: subprocess.Popen[bytes], timeout_s: float, tick: Callable[[], None]) -> int | None:
    ends_s = time.monotonic() + timeout_s
    while (left_s := ends_s - time.monotonic()) > 0:
        try:
            return child.wait(min(left_s, _TICK_S))
        except subprocess.TimeoutExpired:
            tick()
    return None


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """The child, and what it started and left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def tail_of(log: Path, most_chars: int) -> str:
    """The end of what a program printed; empty where it printed nothing."""
    if not log.exists():
        return ""
    return log.read_text("utf-8", errors="replace").strip()[-most_chars:]
