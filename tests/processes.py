"""Whether processes that tests know by their ids have ended."""

import time

import psutil


def is_alive(pid: int) -> bool:
    """An orphan that has ended may wait for a parent to notice: it is not alive."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def has_ended(pid: int, timeout_s: float = 5.0) -> bool:
    """Whether a process ends within the time."""
    deadline_s = time.monotonic() + timeout_s
    while is_alive(pid):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True
