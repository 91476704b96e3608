"""Waiting for what other threads and processes bring about."""

import time
from collections.abc import Callable

import psutil

# A deadline tells a test that hangs from one that is slow: no good run ever waits this long.
PATIENCE_S = 30.0


def until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Wait until the condition holds; an AssertionError after the time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"it did not happen within {timeout_s} s"
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    """An orphan that has ended may wait for a parent to notice: it is not alive."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def has_ended(pid: int) -> bool:
    """Wait for a process to end; False if it does not."""
    deadline_s = time.monotonic() + PATIENCE_S
    while is_alive(pid) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return not is_alive(pid)
