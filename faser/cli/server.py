"""A server from the fetch of its model to its end.

HTTP opens before the model is fetched, answers 503 until the engine is ready, and closes after the last request is
drained. Owns signals and exit statuses. The first SIGTERM or SIGINT drains; a second one quits at once. SIGHUP
reads the key file and the certificate again, and closes no connection; without such files it drains, since a
terminal was closed. Before the server is ready a signal ends it at once: SIGINT with status 130, others with 0.
Knows no routes.
"""

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import uvicorn
import uvloop

from faser.api.http.limits import HttpLimits, raise_open_files_limit
from faser.api.http.server import LimitedServer
from faser.api.loading import LoadingApp
from faser.api.middleware.keys import ApiKeys
from faser.api.page.files import PageFiles
from faser.cli.application import (
    build_application,
    fetch_model,
    make_metrics,
    open_recorder,
    served_names,
)
from faser.cli.console import ProgressReporter
from faser.cli.models import ServedModel, model_line
from faser.cli.preparation import notice, progress_line, read_api_keys, reload_certificate
from faser.config.declaration import Label
from faser.config.engine import EngineConfig
from faser.config.server import ServerConfig
from faser.engine.client.async_engine import AsyncEngine
from faser.engine.client.engine_host import LaunchedEngine
from faser.engine.client.replicas import Replicas
from faser.errors import ConfigError, FaserError
from faser.logs import log_format
from faser.tracing import Tracer
from faser.types.engine import ModelInfo

_CLOSE_TIMEOUT_S = 5
_INTERRUPTED = 130
SAME_S = 0.05  # signals closer together are one: some programs signal a process, and then its group

# While a thread reads a large body the event loop gets its turns this much later, each time it waits for a socket.
_SWITCH_S = 0.001

Ready = TypeVar("Ready", covariant=True)


class Served(Protocol[Ready]):
    """One engine, several with one model, or several models. See AsyncEngine."""

    async def start(self) -> None: ...

    async def wait_ready(self) -> Ready: ...

    async def wait_dead(self) -> FaserError: ...

    async def drain(self, timeout_s: float) -> None: ...

    async def stop(self) -> None: ...


# Does what must come before an engine: fetches the model, builds the application. May be cancelled.
Prepare = Callable[[], Awaitable[Served[Ready]]]

DEFAULT_MODEL_NOTE = (
    "the default model is a small one to try the server with; 'faser serve MODEL' serves another one, such as "
    "qwen2.5-coder-1.5b (a download of 1.1 GB); 'faser models' lists what can be served"
)

_log = logging.getLogger("faser.serve")


def serve_on(
    listener: socket.socket,
    engine_config: EngineConfig,
    server_config: ServerConfig,
    label: Label,
    keys: tuple[str, ...],
    chat_template: str | None,
    began_s: float,
    launched: LaunchedEngine | None = None,
    tracer: Tracer | None = None,
    replica_listeners: Sequence[socket.socket] = (),
) -> int:
    """Serve until a signal; returns the exit status.

    listener, replica_listeners: bound; the latter of the single engines. label: what messages call a setting.
    keys: API keys that requests may present. chat_template: replaces the model's; None: it does not. began_s:
    program start, by time.monotonic(). launched: as of AsyncEngine. tracer: as of create_app.
    Raises ConfigError or EngineError if the model cannot be loaded.
    """
    name = served_names(engine_config, server_config)[0]
    accepted = ApiKeys(keys)
    metrics = make_metrics(engine_config, server_config)
    with (
        open_recorder(server_config, label, metrics.traffic) as recorder,
        ProgressReporter(live=None if log_format() == "text" else False, write=progress_line) as report,
    ):
        https = [
            LoadingApp(
                "the model is being fetched",
                metrics,
                shows_metrics=not server_config.metrics_require_key,
                page=PageFiles() if server_config.page else None,
            )
            for _ in (listener, *replica_listeners)
        ]

        def report_fetch(stage: str, done: int, total: int) -> None:
            report(stage, done, total)
            for http in https:
                http.reason = f"{stage}: {100 * done // total} %" if total else stage

        served: list[ServedModel] = []

        async def prepare() -> AsyncEngine | Replicas:
            directory = await fetch_model(engine_config, report_fetch)
            if engine_config.model is None:
                notice(DEFAULT_MODEL_NOTE)
            served.append(await asyncio.to_thread(ServedModel.of, directory))
            built = await build_application(
                directory,
                engine_config,
                server_config,
                accepted,
                chat_template,
                metrics,
                report,
                launched,
                tracer,
                recorder,
            )
            for http, application in zip(https, (built.app, *built.replicas), strict=True):
                http.application = application
            report("starting the engine", 0, 0)
            return built.engine

        def announce(info: ModelInfo) -> None:
            report.stop()
            notice(model_line(served[0], info))
            threads = max(1, engine_config.threads // server_config.data_parallel_size)
            ready = ready_line(url_of(listener, server_config), name, info, threads, began_s)
            for count, what in (
                (engine_config.tensor_parallel_size, "ranks"),
                (server_config.data_parallel_size, "engines"),
            ):
                ready += f" · {count} {what}" if count > 1 else ""
            notice(ready, to_stdout=True)

        servers = [http_server(http, server_config) for http in https]
        for server in servers:
            server.config.load()  # reads the certificate, so that SIGHUP finds one to replace

        def reload() -> None:
            reload_files(server_config, label, accepted, [server.config.ssl for server in servers])

        return run_until_stopped(
            list(zip(servers, (listener, *replica_listeners), strict=True)),
            prepare,
            server_config.shutdown_timeout,
            announce,
            reload if has_files(server_config) else None,
        )


def ready_line(url: str, model: str, info: ModelInfo, threads: int, began_s: float) -> str:
    """Return the line that tells the operator that the server is ready."""
    stored = "" if info.kv_cache_dtype == info.dtype else f" in {info.kv_cache_dtype}"
    room = f"{info.num_blocks * info.block_size} KV tokens{stored}"
    if info.embedder.is_encoder:
        room = f"texts of {info.max_model_len} tokens"
    return (
        f"ready at {url} · {model} · {info.dtype} · {room} · "
        f"{threads} thread{'s' if threads > 1 else ''} ({info.backend}) · {time.monotonic() - began_s:.1f} s"
    )


def url_of(listener: socket.socket, config: ServerConfig) -> str:
    scheme = "https" if config.ssl_certfile else "http"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


def has_files(config: ServerConfig) -> bool:
    """Return whether there are files to reload on SIGHUP. If not, SIGHUP drains the server."""
    return config.api_key_file is not None or config.ssl_certfile is not None


def reload_files(
    config: ServerConfig, label: Label, keys: ApiKeys, contexts: Sequence[ssl.SSLContext | None]
) -> None:
    """Use what the files hold now. A file that cannot be used is reported; what it held before stays in use.

    label: what messages call a setting.
    """
    if config.api_key_file is not None:
        try:
            keys.replace(read_api_keys(config, label))
        except ConfigError as error:
            _log.error("SIGHUP: the API keys stay as they are: %s", error)
        else:
            _log.info("SIGHUP: %d API keys are accepted now", len(keys))
    if tls := [each for each in contexts if each is not None]:
        try:
            for each in tls:
                reload_certificate(each, config, label)
        except ConfigError as error:
            _log.error("SIGHUP: the certificate stays as it is: %s", error)
        else:
            _log.info("SIGHUP: new connections get the certificate in %s", config.ssl_certfile)


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
    servers: Sequence[tuple[HttpServer, socket.socket]],
    prepare: Prepare[Ready],
    shutdown_timeout_s: float,
    on_ready: Callable[[Ready], None],
    on_hangup: Callable[[], None] | None = None,
) -> int:
    """Serve on the servers' listeners until a signal; returns the exit status.

    on_ready: is called once the engine is ready. on_hangup: is called for each SIGHUP; None: it drains.
    Raises the error with which prepare or the engine's start fails, or with which the engine ends for good.
    """
    raise_open_files_limit()
    sys.setswitchinterval(_SWITCH_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve_until_signal(servers, prepare, shutdown_timeout_s, on_ready, on_hangup))


async def _serve_until_signal(
    servers: Sequence[tuple[HttpServer, socket.socket]],
    prepare: Prepare[Ready],
    shutdown_timeout_s: float,
    on_ready: Callable[[Ready], None],
    on_hangup: Callable[[], None] | None,
) -> int:
    stop = _Stop(on_hangup)
    serving = asyncio.create_task(_serve_all(servers))
    stopping = asyncio.create_task(stop.requested.wait())
    preparing = asyncio.ensure_future(prepare())
    waiting: list[asyncio.Task[Any]] = [stopping]
    engine: Served[Ready] | None = None
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
        for server, _ in servers:
            server.should_exit = True
        preparing.cancel()
        await serving
        if engine is not None:
            await engine.stop()
        for task in waiting:
            task.cancel()
    return stop.status


async def _serve_all(servers: Sequence[tuple[HttpServer, socket.socket]]) -> None:
    await asyncio.gather(*(server.serve(sockets=[listener]) for server, listener in servers))


class _Stop:
    """Requests made by signals. requested: a signal sets it. ready: the server has been ready."""

    def __init__(self, on_hangup: Callable[[], None] | None) -> None:
        """on_hangup: is called for SIGHUP; None: SIGHUP asks for a stop too, unless it is ignored (nohup)."""
        self.requested = asyncio.Event()
        self.ready = False
        self.status = 0
        self._loop = asyncio.get_running_loop()
        self._asked_s: float | None = None  # when SIGTERM or SIGINT came first
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._on_signal, number)
        if on_hangup is not None:
            self._loop.add_signal_handler(signal.SIGHUP, on_hangup)
        elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            self._loop.add_signal_handler(signal.SIGHUP, self._request, signal.SIGHUP)

    def _on_signal(self, number: signal.Signals) -> None:
        now_s = self._loop.time()
        if self._asked_s is None:
            self._asked_s = now_s
        elif now_s - self._asked_s >= SAME_S:
            os._exit(128 + number)
        self._request(number)

    def _request(self, number: signal.Signals) -> None:
        if self.requested.is_set():
            return
        if self.ready:
            said = "finishing running requests; a second Ctrl-C or SIGTERM quits at once"
        else:
            self.status = _INTERRUPTED if number is signal.SIGINT else 0
            said = "stopped before it was ready"
        self.requested.set()  # first: standard error may be a pipe that nothing reads any more
        notice(said)
