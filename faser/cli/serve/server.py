"""serve_on: fetches the model, creates the engine and the application, and serves until a signal.

HTTP answers 503 until the engine is ready, also while fetch.py fetches the model. lifetime.py runs the server.
"""

import socket
import time

from faser.api.loading import LoadingApp
from faser.api.middleware.keys import ApiKeys
from faser.api.page.files import PageFiles
from faser.cli.console.progress import ProgressReporter
from faser.cli.serve.application import build_application, make_metrics, served_names
from faser.cli.serve.fetch import fetch_model
from faser.cli.serve.lifetime import http_server, run_until_stopped
from faser.cli.serve.notices import notice, progress_line
from faser.cli.serve.recording import open_recorder
from faser.cli.serve.refreshing import head_folder, make_refresher
from faser.cli.serve.reload import has_files, reload_files
from faser.config.checks import Label
from faser.config.engine import EngineConfig
from faser.config.server import ServerConfig
from faser.engine.client.async_engine import AsyncEngine
from faser.engine.client.engine_host import LaunchedEngine
from faser.logs.setup import log_format
from faser.tracing.span import Tracer
from faser.types import ModelInfo


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
) -> int:
    """Serve until a signal; returns the exit status.

    listener: bound. label: what messages call a setting. keys: API keys that requests may present. chat_template:
    replaces the model's; None: it does not. began_s: program start, by time.monotonic(). launched: as of
    AsyncEngine. tracer: as of create_app.
    Raises ConfigError or EngineError if the model cannot be loaded.
    """
    name = served_names(engine_config, server_config)[0]
    accepted = ApiKeys(keys)
    metrics = make_metrics(engine_config, server_config)
    with (
        open_recorder(server_config, label, metrics.traffic) as recorder,
        head_folder(server_config) as folder,
        ProgressReporter(live=None if log_format() == "text" else False, write=progress_line) as report,
    ):
        http = LoadingApp(
            "the model is being fetched",
            metrics,
            shows_metrics=not server_config.metrics_require_key,
            page=PageFiles() if server_config.page else None,
        )

        def report_fetch(stage: str, done: int, total: int) -> None:
            report(stage, done, total)
            http.reason = f"{stage}: {100 * done // total} %" if total else stage

        async def prepare() -> AsyncEngine:
            directory = await fetch_model(engine_config, report_fetch)
            engine, http.application = await build_application(
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
                None if folder is None else make_refresher(engine_config, directory, folder, metrics.head_refresh),
            )
            report("starting the engine", 0, 0)
            return engine

        def announce(info: ModelInfo) -> None:
            report.stop()
            ready = ready_line(url_of(listener, server_config), name, info, engine_config.threads, began_s)
            notice(ready, to_stdout=True)

        server = http_server(http, server_config)
        server.config.load()  # reads the certificate, so that SIGHUP finds one to replace
        return run_until_stopped(
            server,
            prepare,
            listener,
            server_config.shutdown_timeout,
            announce,
            (lambda: reload_files(server_config, label, accepted, server.config.ssl))
            if has_files(server_config)
            else None,
        )


def ready_line(url: str, model: str, info: ModelInfo, threads: int, began_s: float) -> str:
    """What tells the operator that the server is ready."""
    tokens = info.num_blocks * info.block_size
    stored = "" if info.kv_cache_dtype == info.dtype else f" in {info.kv_cache_dtype}"
    return (
        f"ready at {url} · {model} · {info.dtype} · {tokens} KV tokens{stored} · "
        f"{threads} thread{'s' if threads > 1 else ''} ({info.backend}) · {time.monotonic() - began_s:.1f} s"
    )


def url_of(listener: socket.socket, config: ServerConfig) -> str:
    scheme = "https" if config.ssl_certfile else "http"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}"
