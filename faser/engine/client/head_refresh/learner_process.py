"""LearnerProcess: the child that trains a head, and how it is stopped, continued and ended.

A stopped process (SIGSTOP) takes no processor time, whatever it computes, and goes on where it was. Knows not when
that should be.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Protocol

from faser.config.environment import child_environment
from faser.engine.contract.messages import Configure, FromLearner, Learn, Started, frame, receive_from_learner
from faser.logs import log_format

_END_S = 5.0


class Learner(Protocol):
    """A learner that has been started. None of its methods waits."""

    def learn(self, task: Learn) -> None:
        """Begin a round. Its end is a message."""
        ...

    def pause(self) -> None:
        """Take no processor time from now on."""
        ...

    def resume(self) -> None: ...

    def kill(self) -> None:
        """End it; nothing follows. Idempotent."""
        ...


# Starts a learner. It calls the first with each message; the second, with how, if it ends by itself.
StartLearner = Callable[[Callable[[FromLearner], None], Callable[[str], None]], Learner]


class LearnerProcess:
    """A Learner in a process of its own, faser.distill.online_worker. Raises OSError if it cannot start.

    configure: as for the engine. Use it from one event loop, and from its thread: the child ends with that thread.
    """

    def __init__(
        self, configure: Configure, on_message: Callable[[FromLearner], None], on_end: Callable[[str], None]
    ) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._waiting: list[bytes] = [frame(configure)]
        self._writer: asyncio.StreamWriter | None = None
        self._is_stoppable = False  # before it has said Started it might outlive this process if it were stopped
        self._is_paused = False
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = _spawn(theirs)
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        self._relaying = asyncio.get_running_loop().create_task(self._relay(ours), name="faser-learner")

    @property
    def pid(self) -> int:
        return self._process.pid

    def learn(self, task: Learn) -> None:
        self._waiting.append(frame(task))
        self._flush()

    def pause(self) -> None:
        self._is_paused = True
        if self._is_stoppable:
            self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._is_paused = False
        if self._is_stoppable:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._relaying.cancel()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)

    async def _relay(self, connection: socket.socket) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        try:
            self._flush()
            while (message := await receive_from_learner(reader)) is not None:
                if isinstance(message, Started):
                    self._is_stoppable = True
                    if self._is_paused:
                        self.pause()
                self._on_message(message)
        finally:
            self._writer.transport.abort()
        status = await asyncio.to_thread(self._ended)
        self._on_end(f"signal {-status}" if status < 0 else f"exit status {status}")

    def _ended(self) -> int:
        """The exit status of a process that has closed its connection."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_END_S)
        self._process.kill()
        return self._process.wait()

    def _flush(self) -> None:
        if self._writer is not None:
            self._writer.writelines(self._waiting)
            self._waiting.clear()


def _spawn(connection: socket.socket) -> subprocess.Popen[bytes]:
    level = logging.getLevelName(logging.getLogger("faser").getEffectiveLevel())
    number = connection.fileno()
    return subprocess.Popen(
        [sys.executable, "-m", "faser.distill.online_worker", str(number), str(os.getpid()), level, log_format()],
        pass_fds=[number],
        env=child_environment(),
        start_new_session=True,  # Ctrl-C reaches only the front-end
    )
