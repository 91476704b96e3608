"""The lifetime of a server: HTTP opens before the model is fetched, and closes after the last request is drained.

Owns signals and exit statuses. The first SIGTERM or SIGINT drains; a second SIGINT quits at once; SIGHUP reloads.
Before the server is ready a signal ends it at once: SIGINT with status 130, SIGTERM with 0. Knows no routes and no
models.
"""

import asyncio
import contextlib
import math
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol

import uvicorn
import uvloop

from faser.api.http.limits import HttpLimits, raise_open_files_limit
from faser.api.http.server import LimitedServer
from faser.cli.serve.notices import notice
from faser.config.server import ServerConfig
from faser.errors import FaserError
from faser.types import ModelInfo

_CLOSE_TIMEOUT_S = 5
_INTERRUPTED = 130

# While a thread reads a large body the event loop gets its turns this much later, each time it waits for a socket.
_SWITCH_S = 0.001


class EngineLifecycle(Protocol):
    """Start and end of an engine, as the server needs them."""

    async def start(self) -> None: ...

    async def wait_ready(self) -> ModelInfo: ...

    async def wait_dead(self) -> FaserError:
        """Wait until the engine has ended for good. Returns the reason."""
        ...

    async def drain(self, timeout_s: float) -> None: ...

    async def stop(self) -> None: ...


# Does what must come before an engine: fetches the model, builds the application. May be cancelled.
Prepare = Callable[[], Awaitable[EngineLifecycle]]


class HttpServer(LimitedServer):
    """The server without uvicorn's signal handling: this module drains requests before it stops the server."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(app: Any, config: ServerConfig) -> HttpServer:
    """app: any ASGI application."""
    return HttpServer(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=not config.disable_uvicorn_access_log,
            root_path=config.root_path or "",
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
            ws="none",
            timeout_keep_alive=math.ceil(config.timeout_keep_alive),
            timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
            server_header=False,
        ),
        HttpLimits.of(config),
    )


def run_until_stopped(
    server: HttpServer,
    prepare: Prepare,
    listener: socket.socket,
    shutdown_timeout_s: float,
    on_ready: Callable[[ModelInfo], None],
    on_hangup: Callable[[], None] | None = None,
) -> int:
    """Serve on listener until a signal; returns the exit status.

    on_ready: is called once the engine is ready. on_hangup: is called for each SIGHUP; None: it ends the program.
    Raises the error with which prepare or the engine's start fails, or with which the engine ends for good.
    """
    raise_open_files_limit()
    sys.setswitchinterval(_SWITCH_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve_until_signal(server, prepare, listener, shutdown_timeout_s, on_ready, on_hangup))


async def _serve_until_signal(
    server: HttpServer,
    prepare: Prepare,
    listener: socket.socket,
    shutdown_timeout_s: float,
    on_ready: Callable[[ModelInfo], None],
    on_hangup: Callable[[], None] | None,
) -> int:
    stop = _Stop()
    if on_hangup is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, on_hangup)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.requested.wait())
    preparing = asyncio.ensure_future(prepare())
    waiting: list[asyncio.Task[Any]] = [stopping]
    engine: EngineLifecycle | None = None
    try:
        await asyncio.wait({serving, preparing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if preparing.done():
            engine = preparing.result()
            loading = asyncio.create_task(engine.wait_ready())
            dying = asyncio.create_task(engine.wait_dead())
            waiting += [loading, dying]
            await engine.start()
            await asyncio.wait({serving, loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                on_ready(loading.result())
                stop.ready = True
                await asyncio.wait({serving, stopping, dying}, return_when=asyncio.FIRST_COMPLETED)
            await engine.drain(shutdown_timeout_s)
            if dying.done():
                raise dying.result()
    finally:
        server.should_exit = True
        preparing.cancel()
        await serving
        if engine is not None:
            await engine.stop()
        for task in waiting:
            task.cancel()
    return stop.status


class _Stop:
    """What signals ask for. requested: the first SIGTERM or SIGINT sets it. ready: the server has been ready."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.ready = False
        self.status = 0
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.requested.is_set():
            if number is signal.SIGINT:
                os._exit(_INTERRUPTED)
            return
        if self.ready:
            said = "finishing running requests; Ctrl-C again quits at once"
        else:
            self.status = _INTERRUPTED if number is signal.SIGINT else 0
            said = "stopped before it was ready"
        self.requested.set()  # first: standard error may be a pipe that nothing reads any more
        notice(said)
