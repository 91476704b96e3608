"""serve_on: fetches the model, creates the engine and the application, and serves until a signal.

HTTP answers 503 until the engine is ready, also while fetch.py fetches the model. lifetime.py runs the server.
"""

import asyncio
import socket
import time
from pathlib import Path

from faser import __version__
from faser.api.app import create_app
from faser.api.loading import LoadingApp
from faser.api.middleware.api_keys import ApiKeys
from faser.api.middleware.cors import CorsSettings
from faser.api.middleware.key_limits import KeyLimits
from faser.api.serving.requests.settings import ApiSettings
from faser.cli.console.progress import ProgressReporter
from faser.cli.serve.fetch import fetch_model
from faser.cli.serve.generation import sampling_defaults
from faser.cli.serve.lifetime import http_server, run_until_stopped
from faser.cli.serve.reload import has_files, reload_files
from faser.config.checks import Label
from faser.config.engine import EngineConfig
from faser.config.server import ServerConfig
from faser.engine.client.async_engine import AsyncEngine
from faser.engine.client.supervisor import Supervision
from faser.engine.text.tokenizer import load_tokenizer
from faser.metrics.server import Metrics
from faser.types import ModelInfo

_EMBEDDED_NAME = "SmolLM2-135M-Instruct"


def serve_on(
    listener: socket.socket,
    engine_config: EngineConfig,
    server_config: ServerConfig,
    label: Label,
    keys: tuple[str, ...],
    chat_template: str | None,
    began_s: float,
) -> int:
    """Serve until a signal; returns the exit status.

    listener: bound. label: what messages call a setting. keys: API keys that requests may present. chat_template:
    replaces the model's; None: it does not. began_s: program start, by time.monotonic().
    Raises ConfigError or EngineError if the model cannot be loaded.
    """
    names = server_config.served_model_name or (engine_config.model or _EMBEDDED_NAME,)
    accepted = ApiKeys(keys)
    with ProgressReporter() as report:
        http = LoadingApp("the model is being fetched")

        def report_fetch(stage: str, done: int, total: int) -> None:
            report(stage, done, total)
            http.reason = f"{stage}: {100 * done // total} %" if total else stage

        async def prepare() -> AsyncEngine:
            directory = await fetch_model(engine_config, report_fetch)
            tokenizer = await asyncio.to_thread(load_tokenizer, Path(engine_config.tokenizer or directory))
            speculation = engine_config.speculation
            metrics = Metrics(
                model_name=names[0], max_model_len=engine_config.max_model_len or 0, speculation=speculation
            )
            supervision = Supervision(
                max_restarts=server_config.engine_restarts, timeout_s=server_config.engine_timeout
            )
            engine = AsyncEngine(
                engine_config, directory, tokenizer, supervision=supervision, metrics=metrics, on_progress=report
            )
            settings = ApiSettings(
                served_model_names=names,
                api_keys=keys,
                share_cache_across_keys=server_config.share_cache_across_keys,
                max_request_bytes=server_config.max_request_bytes,
                strict_request_fields=server_config.strict_request_fields,
                chat_template=chat_template,
                generation_defaults=sampling_defaults(directory, server_config),
                version=__version__,
                force_include_usage=server_config.enable_force_include_usage,
                max_logprobs=engine_config.max_logprobs,
                enable_metrics_auth=server_config.metrics_require_key,
                key_limits=_key_limits(server_config),
                cors=_cors(server_config),
                request_timeout_s=server_config.request_timeout,
                speculation=speculation,
                spec_decode_metrics=engine_config.per_request_spec_decode_metrics,
            )
            http.application = create_app(engine, settings=settings, metrics=metrics, keys=accepted)
            report("starting the engine", 0, 0)
            return engine

        def announce(info: ModelInfo) -> None:
            report.stop()
            print(
                ready_line(url_of(listener, server_config), names[0], info, engine_config.threads, began_s),
                flush=True,
            )

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
    """The line that tells the operator that the server is ready."""
    tokens = info.num_blocks * info.block_size
    return (
        f"faser serve: ready at {url} · {model} · {info.dtype} · {tokens} KV tokens · "
        f"{threads} thread{'s' if threads > 1 else ''} ({info.backend}) · {time.monotonic() - began_s:.1f} s"
    )


def url_of(listener: socket.socket, config: ServerConfig) -> str:
    scheme = "https" if config.ssl_certfile else "http"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


def _key_limits(config: ServerConfig) -> KeyLimits:
    return KeyLimits(
        parallel_requests=config.key_max_parallel_requests,
        requests_per_minute=config.key_rpm_limit,
        tokens_per_minute=config.key_tpm_limit,
    )


def _cors(config: ServerConfig) -> CorsSettings:
    return CorsSettings(
        origins=config.allowed_origins,
        methods=config.allowed_methods,
        headers=config.allowed_headers,
        credentials=config.allow_credentials,
    )
