"""Helper programs that can be cancelled: pip, a hub download, a compiler. And signals as what cancels them.

The commands of Python children; processes that end with their parent.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_CHILD = str(Path(__file__).resolve().with_name("child.py"))
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.1
_END_S = 1.0  # for a program to remove its own temporary files after SIGTERM


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Result of a program that has ended. status: negative after a signal."""

    status: int
    stdout: str
    stderr: str


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this interpreter, as `python -m` does.

    Unlike there nothing is imported from the working directory, and `faser` is this very package (child.py).
    """
    return [sys.executable, "-P", _CHILD, module, *arguments]


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
    with _started(command, environment) as program:
        while not program.ends_within(_POLL_S):
            watch(program.stdout)
        return program.ended()


def run_all_watched(commands: Sequence[Sequence[str]], watch: Callable[[], None], *, at_once: int) -> list[Ended]:
    """Run programs to their ends, at most at_once of them at the same time; how they ended, in their order.

    watch: is called about ten times a second; what it raises ends all programs, as in run_watched. After one that
    fails no further one is started: the list ends with the last that was started.
    """
    programs: list[_Program] = []
    with contextlib.ExitStack() as stack:
        for command in commands:
            while sum(each.running for each in programs) >= at_once:
                _wait_for_any(programs)
                watch()
            if any(each.failed for each in programs):
                break
            programs.append(stack.enter_context(_started(command)))
        while any(each.running for each in programs):
            _wait_for_any(programs)
            watch()
        return [each.ended() for each in programs]


@contextlib.contextmanager
def _started(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator["_Program"]:
    """A program that runs with its output in temporary files. Leaving the context ends it, with its children."""
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
            yield _Program(process, out.fileno(), err.fileno())
        finally:
            _end_group(process)


class _Program:
    """out, err: descriptors of the files that it writes to."""

    def __init__(self, process: subprocess.Popen[bytes], out: int, err: int) -> None:
        self._process = process
        self._out = out
        self._err = err

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def failed(self) -> bool:
        return bool(self._process.poll())

    @property
    def stdout(self) -> str:
        """Return what the program has printed so far."""
        return _text(self._out)

    def ends_within(self, seconds: float) -> bool:
        """Wait this long at most; returns whether it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
            return True
        return False

    def ended(self) -> Ended:
        """Wait for the program's end; return its result."""
        status = self._process.wait()
        return Ended(status=status, stdout=self.stdout, stderr=_text(self._err))


def _wait_for_any(programs: Sequence[_Program]) -> None:
    """Wait until one of those that run has ended, for a tenth of a second at most."""
    running = [each for each in programs if each.running]
    if running:
        running[0].ends_within(_POLL_S)


@contextlib.contextmanager
def exit_on_sigterm(status: int) -> Iterator[None]:
    """Make SIGTERM raise SystemExit, so that what runs is cleaned up; SIGHUP too, unless it is ignored (nohup).

    By default the first process of a container ignores SIGTERM.
    """

    def leave(number: int, frame: object) -> None:
        del number, frame
        sys.exit(status)

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, leave)}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, even while it is stopped. Linux alone has this.

    parent: its process id; if it has ended already, so does this process.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


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
