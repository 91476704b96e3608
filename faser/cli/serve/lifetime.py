"""The lifetime of a server: HTTP opens while the engine loads, and closes after the last request is drained.

Owns signals and exit statuses. The first SIGTERM or SIGINT drains; a second SIGINT quits at once; SIGHUP reloads.
Knows no routes and no models.
"""

import asyncio
import contextlib
import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import uvicorn
import uvloop

from faser.api.http.descriptors import raise_open_files_limit
from faser.api.http.limits import HttpLimits
from faser.api.http.server import LimitedServer
from faser.config.server import ServerConfig
from faser.errors import FaserError
from faser.types import ModelInfo

_CLOSE_TIMEOUT_S = 5
_INTERRUPTED = 130


class EngineLifecycle(Protocol):
    """Start and end of an engine, as the server needs them."""

    async def start(self) -> None: ...

    async def wait_ready(self) -> ModelInfo: ...

    async def wait_dead(self) -> FaserError:
        """Wait until the engine has ended for good. Returns the reason."""
        ...

    async def drain(self, timeout_s: float) -> None: ...

    async def stop(self) -> None: ...


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
    engine: EngineLifecycle,
    listener: socket.socket,
    shutdown_timeout_s: float,
    on_ready: Callable[[ModelInfo], None],
    on_hangup: Callable[[], None] | None = None,
) -> int:
    """Serve on listener until a signal; returns exit status 0.

    on_ready: is called once the engine is ready. on_hangup: is called for each SIGHUP; None: it ends the program.
    Raises the error with which the engine fails to load, or ends for good.
    """
    raise_open_files_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve_until_signal(server, engine, listener, shutdown_timeout_s, on_ready, on_hangup))


async def _serve_until_signal(
    server: HttpServer,
    engine: EngineLifecycle,
    listener: socket.socket,
    shutdown_timeout_s: float,
    on_ready: Callable[[ModelInfo], None],
    on_hangup: Callable[[], None] | None,
) -> int:
    stop = _stop_event()
    if on_hangup is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, on_hangup)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    loading = asyncio.create_task(engine.wait_ready())
    stopping = asyncio.create_task(stop.wait())
    dying = asyncio.create_task(engine.wait_dead())
    try:
        await engine.start()
        await asyncio.wait({serving, loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            on_ready(loading.result())
            await asyncio.wait({serving, stopping, dying}, return_when=asyncio.FIRST_COMPLETED)
        await engine.drain(shutdown_timeout_s)
        if dying.done():
            raise dying.result()
    finally:
        server.should_exit = True
        await serving
        await engine.stop()
        for task in (loading, stopping, dying):
            task.cancel()
    return 0


def _stop_event() -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets."""
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set() and number is signal.SIGINT:
            os._exit(_INTERRUPTED)
        if not stop.is_set():
            print(
                "faser serve: finishing running requests; Ctrl-C again quits at once", file=sys.stderr, flush=True
            )
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return stop


@contextlib.contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """Make SIGTERM end the program until the server handles signals.

    By default the first process of a container ignores SIGTERM.
    """

    def leave(number: int, frame: object) -> None:
        del number, frame
        sys.exit(0)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def hangups_ignored() -> Iterator[None]:
    """Make SIGHUP harmless until the server handles it, for operators who reload while the model is loaded."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
