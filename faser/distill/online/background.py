"""What makes a process stay behind: it computes when nothing else does, and ends with its parent.

Linux alone: SCHED_IDLE, prctl and /proc.
"""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_FIRST_TO_GO = "1000"  # where memory runs out, the kernel ends this process before any other


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends: one that is stopped reads no end of a socket.

    parent: its process id; if it has ended already, so does this process.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


def stay_behind() -> None:
    """Take processor time that nothing else wants, and give memory back first."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):  # a container without /proc of its own
        _OOM_SCORE.write_text(_FIRST_TO_GO)
