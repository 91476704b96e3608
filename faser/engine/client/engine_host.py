"""EngineHost: the child process or the thread in which an engine runs. Starts it, ends it, says how it ended.

In both cases the engine serves the same messages on its end of a socket pair.
"""

import contextlib
import logging
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from faser.config.environment import child_environment
from faser.logs import log_format
from faser.processes import python_command

Transport = Literal["process", "thread"]

_STOP_TIMEOUT_S = 5.0

_log = logging.getLogger("faser.engine")


class EngineHost(Protocol):
    """A started engine. All methods block for a few seconds at most."""

    def wait(self) -> None:
        """Wait for an engine that was sent Shutdown; kill it if it does not end."""
        ...

    def exit_status(self) -> str:
        """Describe how an engine ended that closed its connection, as a suffix for an error message."""
        ...

    def kill(self) -> None:
        """End an engine whose connection is closed, whatever it does. A thread is waited for instead."""
        ...


# Starts an engine that serves the given end of a socket pair, and hands it that end.
StartHost = Callable[[Transport, socket.socket], EngineHost]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Cores and GPUs of a process. cores: None: all that this one may use. gpus: the only ones; none: any."""

    cores: tuple[int, ...] | None = None
    gpus: tuple[int, ...] = ()


def start_host(transport: Transport, connection: socket.socket, place: Place = Place()) -> EngineHost:
    """Start an engine that serves connection; it takes over the socket. place: of an engine in a process."""
    return _ProcessHost(connection, place) if transport == "process" else _ThreadHost(connection)


@dataclass(frozen=True, slots=True)
class LaunchedEngine:
    """An engine that waits for its first message. connection: the front-end's end of the socket pair."""

    host: EngineHost
    connection: socket.socket

    def discard(self) -> None:
        """End an engine that is not needed. One in a process ends with the connection, and is killed if not."""
        self.connection.close()
        self.host.kill()


def launch(transport: Transport, start: StartHost = start_host) -> LaunchedEngine:
    """Start an engine. Its process begins to import what it needs, which takes seconds. Raises OSError."""
    ours, theirs = socket.socketpair()
    try:
        return LaunchedEngine(start(transport, theirs), ours)
    except BaseException:
        ours.close()
        raise


class _ProcessHost:
    def __init__(self, connection: socket.socket, place: Place) -> None:
        with connection:
            self._process = subprocess.Popen(
                python_command("faser.engine.worker", str(connection.fileno()), _log_level(), log_format()),
                pass_fds=[connection.fileno()],
                env=child_environment(gpus=place.gpus),
                start_new_session=True,  # Ctrl-C reaches only the front-end, which drains
            )
            if place.cores is not None:
                os.sched_setaffinity(self._process.pid, place.cores)  # before it has a second thread

    def wait(self) -> None:
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def exit_status(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(_STOP_TIMEOUT_S)
            return f" (signal {-status})" if status < 0 else f" (exit status {status})"
        return ""

    def kill(self) -> None:
        self._process.kill()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # held by the kernel, in a device's driver say; nothing more can be done
            _log.error("the engine's process %d does not end, although it was killed", self._process.pid)


def _log_level() -> str:
    return logging.getLevelName(logging.getLogger("faser").getEffectiveLevel())


class _ThreadHost:
    def __init__(self, connection: socket.socket) -> None:
        self._thread = threading.Thread(target=_serve, args=(connection,), name="faser-engine", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join(_STOP_TIMEOUT_S)

    def exit_status(self) -> str:
        return ""

    def kill(self) -> None:
        self.wait()


def _serve(connection: socket.socket) -> None:
    from faser.engine.worker import serve  # imports torch into this process

    with connection:
        serve(connection, own_process=False)
