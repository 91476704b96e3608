"""EngineSupervisor: keeps one engine running. It starts the engine, watches it, and starts it again after a death.

Owns the engine's process or thread, the connection to it, and the decision whether another start follows. Knows no
requests: AsyncEngine takes the messages, and is informed when an engine has ended.

    start ──▶ loading ──▶ ready ──▶ died, or hung and killed ──pause──▶ loading ──▶ ...
                 │                            └──▶ the last end: no restart is left
                 └──▶ the last end: an engine that was never ready would fail again
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from faser.engine.client.engine_host import EngineHost, LaunchedEngine, StartHost, Transport, launch, start_host
from faser.engine.contract.messages import (
    Configure,
    Failed,
    FromEngine,
    Shutdown,
    StateChange,
    ToEngine,
    frame,
    receive_async,
)
from faser.errors import ConfigError, EngineDiedError, FaserError
from faser.types.engine import EngineState

# Restarts are counted within this time: a rare death must not add up over months.
RESTART_WINDOW_S = 600.0

# The pause before a restart doubles with each within the window.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0

_TICK_S = 0.5  # how often the engine is looked at

_log = logging.getLogger("faser.engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """max_restarts: within RESTART_WINDOW_S. timeout_s: an engine that is silent for longer hangs."""

    max_restarts: int = 0
    timeout_s: float = 120.0


class EngineSupervisor:
    """One engine through all its lives. Use it from one event loop only.

    configure: the first message to each engine. on_message: called with every other message from the engine; a
    FaserError that it raises ends the engine. on_end: called at once when an engine has died or hangs, with the
    reason and the seconds after which the next one should be ready; None: there is none. launched: the first
    engine, if it has been started already.

    A thread can be neither killed nor replaced: what it holds stays in this process. So the thread transport,
    which is for tests and for the offline API, is not watched, and its first end is the last.
    """

    def __init__(
        self,
        configure: Configure,
        supervision: Supervision,
        *,
        transport: Transport,
        on_message: Callable[[FromEngine], None],
        on_end: Callable[[FaserError, float | None], None],
        launched: LaunchedEngine | None = None,
        start: StartHost = start_host,
    ) -> None:
        assert transport == "process" or not supervision.max_restarts, "an engine in a thread cannot be restarted"
        self._configure = configure
        self._supervision = supervision
        self._transport: Transport = transport
        self._on_message = on_message
        self._on_end = on_end
        self._launched = launched
        self._start_host = start
        self._host: EngineHost | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._supervising: asyncio.Task[None] | None = None
        self._ready = False
        self._first_load_s: float | None = None  # None: no engine has been ready yet
        self._last_load_s = 0.0
        self._restarted_s: deque[float] = deque()  # when, within the window
        self._may_restart = True
        self._silent_s = 0.0

    def start(self) -> None:
        """Start the engine, which begins to load."""
        self._supervising = asyncio.create_task(self._supervise(), name="faser-engine-supervisor")

    def send(self, message: ToEngine) -> None:
        """Send a message. An engine that has ended does not get it."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))

    def end_restarts(self) -> None:
        """From now on the engine is not started again."""
        self._may_restart = False

    async def stop(self) -> None:
        """End the engine now, without calling on_end. Idempotent."""
        supervising, self._supervising = self._supervising, None
        if supervising is None:
            return
        if self._host is not None:
            self.send(Shutdown())
            await asyncio.to_thread(self._host.wait)
        supervising.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await supervising
        await self._bury()

    async def _supervise(self) -> None:
        while True:
            error = await self._live()
            if self._supervising is None:  # stopped
                return
            pause_s = self._plan_restart()
            self._report(error, pause_s)
            await self._bury()
            if pause_s is None:
                return
            await asyncio.sleep(pause_s)

    async def _live(self) -> FaserError:
        """One life of the engine. Returns how it ended."""
        began_s = time.monotonic()
        try:
            reader = await self._launch()
        except OSError as error:
            return EngineDiedError(f"the engine cannot be started: {error.strerror}")
        relaying = asyncio.create_task(self._relay(reader, began_s))
        watching = asyncio.create_task(self._watch())
        try:
            await asyncio.wait({relaying, watching}, return_when=asyncio.FIRST_COMPLETED)
            return relaying.result() if relaying.done() else watching.result()
        finally:
            self._ready = False
            relaying.cancel()
            watching.cancel()
            await asyncio.gather(relaying, watching, return_exceptions=True)

    async def _launch(self) -> asyncio.StreamReader:
        """Start a process or thread, and connect to it. Raises OSError where this machine cannot."""
        launched, self._launched = self._launched or launch(self._transport, self._start_host), None
        self._host, ours = launched.host, launched.connection
        try:
            ours.setblocking(False)
            reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        self._silent_s = 0.0
        self.send(self._configure)
        return reader

    async def _relay(self, reader: asyncio.StreamReader, began_s: float) -> FaserError:
        """Hand on the engine's messages until it ends. Returns how it ended."""
        assert self._host is not None
        try:
            while (message := await receive_async(reader)) is not None:
                self._silent_s = 0.0
                if isinstance(message, Failed):
                    return _failure(message)
                if message == StateChange(EngineState.READY):
                    self._note_ready(time.monotonic() - began_s)
                self._on_message(message)
        except FaserError as error:
            return error
        except Exception as error:  # a bug in this process: without this, all requests would wait for ever
            _log.exception("a message from the engine cannot be handled")
            return EngineDiedError(f"the engine was ended: its message cannot be handled: {error!r}")
        return EngineDiedError(f"the engine died{await asyncio.to_thread(self._host.exit_status)}")

    async def _watch(self) -> FaserError:
        """Return when the engine has been silent for too long.

        Adds up ticks instead of comparing clocks: where this process did not run either, because the machine
        slept say, the engine's messages have yet to be read.
        """
        while self._silent_s < self._patience_s():
            await asyncio.sleep(_TICK_S)
            self._silent_s += _TICK_S
        return EngineDiedError(f"the engine hung: it was silent for {self._silent_s:.0f} s and was killed")

    def _patience_s(self) -> float:
        """The longest silence. A first load may take any time; later ones find kernels and step times cached."""
        if self._transport == "thread":
            return math.inf
        if self._ready:
            return self._supervision.timeout_s
        return math.inf if self._first_load_s is None else self._first_load_s + self._supervision.timeout_s

    def _note_ready(self, load_s: float) -> None:
        self._ready = True
        self._last_load_s = load_s
        if self._first_load_s is None:
            self._first_load_s = load_s
        else:
            _log.warning("the engine is ready again; it took %.1f s to start", load_s)

    def _plan_restart(self) -> float | None:
        """Count a restart. Returns the seconds until it; None: there is none."""
        now = time.monotonic()
        while self._restarted_s and now - self._restarted_s[0] > RESTART_WINDOW_S:
            self._restarted_s.popleft()
        used = len(self._restarted_s)
        if self._first_load_s is None or not self._may_restart or used >= self._supervision.max_restarts:
            return None
        self._restarted_s.append(now)
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0**used)

    def _report(self, error: FaserError, pause_s: float | None) -> None:
        """Tell the log and the owner. The error of a first load is not logged: wait_ready raises it."""
        restarts = f"{len(self._restarted_s)} of {self._supervision.max_restarts} restarts"
        used = f"{restarts} within {RESTART_WINDOW_S / 60:.0f} minutes used"
        if pause_s is not None:
            _log.error("%s; it is started again in %.0f s (%s)", error, pause_s, used)
        elif self._first_load_s is not None:
            error = EngineDiedError(f"{error}; it is not started again ({used})")
            _log.error("%s", error)
        self._on_end(error, None if pause_s is None else pause_s + self._last_load_s)

    async def _bury(self) -> None:
        """Close the connection and end what is left of the engine."""
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None
        if self._host is not None:
            await asyncio.to_thread(self._host.kill)
            self._host = None


def _failure(message: Failed) -> FaserError:
    text = message.message
    return ConfigError(text) if message.operator_error else EngineDiedError(f"the engine died: {text}")
