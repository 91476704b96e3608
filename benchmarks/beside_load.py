"""Busy processes beside a measurement: how something fares on a machine that is not its own."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

# Ends with its parent, also with one that was killed. Looks for it about ten times a second.
_SPIN = """
import os, sys
parent = int(sys.argv[1])
while os.getppid() == parent:
    for _ in range(2_000_000):
        pass
"""
_END_TIMEOUT_S = 10.0


@contextlib.contextmanager
def beside_load(count: int) -> Iterator[None]:
    """`count` processes of normal priority that each keep a core busy as long as the block runs."""
    command = [sys.executable, "-c", _SPIN, str(os.getpid())]
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.callback(_end, subprocess.Popen(command, stdin=subprocess.DEVNULL))
        yield


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(_END_TIMEOUT_S)
