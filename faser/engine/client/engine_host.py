"""Where an engine runs: a child process, or a thread of this one. Owns its start and its end.

Either way the engine has one end of a socket pair and serves the same messages on it.
"""

import contextlib
import logging
import socket
import subprocess
import sys
import threading
from typing import Literal, Protocol

from faser.config.environment import child_environment

Transport = Literal["process", "thread"]

_STOP_TIMEOUT_S = 5.0


class EngineHost(Protocol):
    """A started engine. Both methods block, for a few seconds at most."""

    def wait(self) -> None:
        """Wait for an engine that has been told to end; end it by force if it does not."""
        ...

    def exit_status(self) -> str:
        """How an engine that vanished has ended, as words to append to a message."""
        ...


def start_host(transport: Transport, connection: socket.socket) -> EngineHost:
    """Start an engine that serves connection; this process's hold on that end is given up."""
    return _Process(connection) if transport == "process" else _Thread(connection)


class _Process:
    def __init__(self, connection: socket.socket) -> None:
        with connection:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "faser.engine.worker", str(connection.fileno()), _log_level()],
                pass_fds=[connection.fileno()],
                env=child_environment(),
                start_new_session=True,  # Ctrl-C is for the front-end, which drains
            )

    def wait(self) -> None:
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def exit_status(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(_STOP_TIMEOUT_S)
            return f" (signal {-status})" if status < 0 else f" (exit status {status})"
        return ""


def _log_level() -> str:
    return logging.getLevelName(logging.getLogger("faser").getEffectiveLevel())


class _Thread:
    def __init__(self, connection: socket.socket) -> None:
        self._thread = threading.Thread(target=_serve, args=(connection,), name="faser-engine", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join(_STOP_TIMEOUT_S)

    def exit_status(self) -> str:
        return ""


def _serve(connection: socket.socket) -> None:
    from faser.engine.worker import serve  # brings torch into this process

    with connection:
        serve(connection, own_process=False)
