"""A rank ends with rank 0 from its first moment.

Planted bugs that this test has caught: a death signal that is asked for after the imports; imports at the top.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.waiting import has_ended, is_alive

# Starts a rank, says which process it is, and waits.
PARENT = """
import os, subprocess, sys
module = "faser.engine.execution.startup.follower"
command = [sys.executable, "-m", module, "INFO", "text", "1", "2", "0", str(os.getpid())]
print(subprocess.Popen(command).pid, flush=True)
sys.stdin.read()
"""
# An import of torch that says that it has begun, and never ends.
TORCH = """
import pathlib, time
pathlib.Path({marker!r}).touch()
time.sleep(1000)
"""


def test_a_rank_that_still_imports_ends_with_a_killed_parent(tmp_path: Path) -> None:
    marker = tmp_path / "imports"
    (tmp_path / "torch.py").write_text(TORCH.format(marker=str(marker)))
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        rank = int(parent.stdout.readline())
        try:
            while not marker.exists():
                assert is_alive(rank)
                time.sleep(0.02)
            parent.kill()
            assert has_ended(rank)
        finally:
            parent.kill()
            if is_alive(rank):
                os.kill(rank, signal.SIGKILL)
