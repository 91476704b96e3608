"""Trials: whether a grammar compiles within a budget, tried in a process that can be killed.

llguidance compiles with the interpreter lock released, but cannot be interrupted, and its limits leave gaps:
schemas of sixty bytes compile for hours, and chains of a thousand references overflow the stack. A trial finds
both, and whatever other keyword is costly, for a few milliseconds more with an ordinary grammar. Its process
holds the tokenizer, 50 MB for 49,000 tokens, and starts with the first trial.
"""

import contextlib
import json
import select
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from faser.config.environment import child_environment
from faser.engine.structure.trial_process import LENGTH, MOST_BYTES
from faser.errors import EngineError, GrammarCostError
from faser.processes import python_command

_POLL_S = 0.05  # how often a trial asks whether it is still wanted


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one trial. nice: as of a process. is_wanted: asked meanwhile; False ends the trial."""

    cpu_s: float
    nice: int = 0
    is_wanted: Callable[[], bool] = lambda: True


QUICK = Budget(0.05)  # ordinary grammars take up to 0.015
COSTLY = Budget(0.5, nice=5)


@dataclass(frozen=True, slots=True)
class Trial:
    """Outcome of a trial. fault: what is wrong with the grammar; None: nothing is. num_bytes: of its matcher."""

    fault: str | None
    num_bytes: int


class TrialUnwantedError(Exception):
    """The trial was ended because its result is not wanted any more."""


class Trials:
    """Threads may share it. setup: what the process reads first, as in trial_process.py."""

    def __init__(self, setup: bytes) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._end: Callable[[], object] = lambda: None

    def run(self, grammar: str, schema: Any, budget: Budget, *, any_whitespace: bool) -> Trial:
        """Compile a grammar. schema: whose grammar it is, to find the place of a fault; None: no schema's.

        Raises GrammarCostError beyond the budget, TrialUnwantedError when it is not wanted any more.
        """
        limits = {"cpu_s": budget.cpu_s, "nice": budget.nice}
        asked = {"grammar": grammar, "schema": schema, "any_whitespace": any_whitespace, **limits}
        found = self._ask(json.dumps(asked).encode(), budget.is_wanted)
        if "fault" in found:
            reason = found["fault"]
            return Trial(None if reason is None else f"{found.get('place', '')}{reason}", found["num_bytes"])
        match found.get("signal"):
            case signal.SIGPROF:
                raise GrammarCostError(
                    f"it takes more than {budget.cpu_s * 1e3:.0f} ms of processor time; use fewer or smaller "
                    "multipleOf, patterns, alternatives and constraints that must hold together"
                )
            case signal.SIGSEGV | signal.SIGBUS:
                raise GrammarCostError("it overflows the stack; use fewer rules or references within each other")
            case signal.SIGABRT:
                raise GrammarCostError(f"it needs more than {MOST_BYTES >> 20} MB of memory; make it smaller")
        raise EngineError(f"the trial compilation of a grammar was ended from outside: {found}; try again")

    def _ask(self, message: bytes, is_wanted: Callable[[], bool]) -> dict[str, Any]:
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._hand_over(theirs)
            ours.sendall(LENGTH.pack(len(message)) + message)
            lines = bytearray()
            while True:
                if not select.select([ours], [], [], _POLL_S)[0]:
                    if not is_wanted():
                        raise TrialUnwantedError
                elif part := ours.recv(1 << 16):
                    lines += part
                else:
                    break
        found: dict[str, Any] = {}
        for line in lines.splitlines():
            found |= json.loads(line)
        return found

    def _hand_over(self, end: socket.socket) -> None:
        """Start a trial at this end of a socket, in a new process if there is none or the old one was killed."""
        with self._lock:
            if self._control is not None:
                with contextlib.suppress(ConnectionError):
                    socket.send_fds(self._control, [b"."], [end.fileno()])
                    return
            self._control = self._start()
            socket.send_fds(self._control, [b"."], [end.fileno()])

    def _start(self) -> socket.socket:
        self._end()
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                python_command("faser.engine.structure.trial_process", str(theirs.fileno())),
                env=child_environment(),
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is the front-end's
            )
        self._process = process
        self._end = weakref.finalize(self, _end_process, process, ours)
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(self._setup)
        return ours


def _end_process(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.wait()
