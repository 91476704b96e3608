"""Helper programs that can be cancelled: pip, a hub download, a compiler. And SIGTERM as what cancels them."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

_POLL_S = 0.1
_END_S = 1.0  # for a program to remove its own temporary files after SIGTERM


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a program ended. status: negative after a signal."""

    status: int
    stdout: str
    stderr: str


def run_watched(
    command: Sequence[str],
    watch: Callable[[str], None],
    *,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run a program to its end.

    watch: is called about ten times a second with what the program has printed so far on stdout. What it raises
    ends the program, with every process that the program has started; so does KeyboardInterrupt.
    environment: None: this process's own. Raises OSError if the program cannot be started.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=None if environment is None else dict(environment),
            process_group=0,  # one signal reaches the program and its children
        )
        try:
            while True:
                try:
                    status = process.wait(_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    watch(_text(out.fileno()))
        finally:
            _end_group(process)
        return Ended(status=status, stdout=_text(out.fileno()), stderr=_text(err.fileno()))


@contextlib.contextmanager
def exit_on_sigterm(status: int) -> Iterator[None]:
    """Make SIGTERM raise SystemExit, so that what runs is cleaned up.

    By default the first process of a container ignores SIGTERM.
    """

    def leave(number: int, frame: object) -> None:
        del number, frame
        sys.exit(status)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _text(descriptor: int) -> str:
    """All that a file holds. Leaves the position alone, at which the program writes."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode("utf-8", "replace")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a program that still runs, and its children."""
    if process.poll() is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
            return
