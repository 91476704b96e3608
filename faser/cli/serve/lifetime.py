"""The lifetime of a server: HTTP opens before the model is fetched, and closes after the last request is drained.

Owns signals and exit statuses. The first SIGTERM or SIGINT drains; a second SIGINT quits at once. Before the
server is ready a signal ends it at once: SIGINT with status 130, SIGTERM with 0. Knows no routes and no models.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol

import uvicorn
import uvloop

from faser.config.server import ServerConfig
from faser.types import ModelInfo

_CLOSE_TIMEOUT_S = 5
_INTERRUPTED = 130


class EngineLifecycle(Protocol):
    """Start and end of an engine, as the server needs them."""

    async def start(self) -> None: ...

    async def wait_ready(self) -> ModelInfo: ...

    async def drain(self, timeout_s: float) -> None: ...

    async def stop(self) -> None: ...


# Does what must come before an engine: fetches the model, builds the application. May be cancelled.
Prepare = Callable[[], Awaitable[EngineLifecycle]]


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handling: this module drains requests before it stops the server."""

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
            timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
            server_header=False,
        )
    )


def run_until_stopped(
    server: HttpServer,
    prepare: Prepare,
    listener: socket.socket,
    shutdown_timeout_s: float,
    on_ready: Callable[[ModelInfo], None],
) -> int:
    """Serve on listener until a signal; returns the exit status.

    on_ready: is called once the engine is ready. Raises the error with which prepare or the engine's start fails.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve_until_signal(server, prepare, listener, shutdown_timeout_s, on_ready))


async def _serve_until_signal(
    server: HttpServer,
    prepare: Prepare,
    listener: socket.socket,
    shutdown_timeout_s: float,
    on_ready: Callable[[ModelInfo], None],
) -> int:
    stop = _Stop()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.requested.wait())
    preparing = asyncio.ensure_future(prepare())
    engine: EngineLifecycle | None = None
    loading: asyncio.Task[ModelInfo] | None = None
    try:
        await asyncio.wait({serving, preparing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if preparing.done():
            engine = preparing.result()
            loading = asyncio.create_task(engine.wait_ready())
            await engine.start()
            await asyncio.wait({serving, loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                on_ready(loading.result())
                stop.ready = True
                await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            await engine.drain(shutdown_timeout_s)
    finally:
        server.should_exit = True
        preparing.cancel()
        await serving
        if engine is not None:
            await engine.stop()
        for task in (loading, stopping):
            if task is not None:
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
        print(f"faser serve: {said}", file=sys.stderr, flush=True)
        self.requested.set()
