"""The front-end on a loopback port, in a thread, over a fake engine."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import openai
import uvicorn

from faser.api.app import ApiSettings, create_app
from faser.api.middleware.key_limits import KeyLimits
from faser.api.middleware.keys import ApiKeys
from faser.api.requests.adapters import Adapters
from faser.api.requests.service import CorsSettings, EngineClient
from faser.cli.preparation import listen
from faser.cli.server import http_server
from faser.config.server import ServerConfig
from faser.config.speculation import SpeculationConfig
from faser.metrics.server import Metrics
from faser.tracing import Tracer
from tests.waiting import PATIENCE_S, until

MODEL = "tiny"


def settings(
    *,
    api_keys: tuple[str, ...] = (),
    share_cache_across_keys: bool = False,
    strict: bool = False,
    max_request_bytes: int = 32 << 20,
    chat_template: str | None = None,
    generation_defaults: dict[str, float] | None = None,
    force_include_usage: bool = False,
    per_request_metrics: bool = False,
    shorten_max_tokens: bool = False,
    max_logprobs: int = 20,
    metrics_auth: bool = False,
    speculation: SpeculationConfig | None = None,
    spec_decode_metrics: str = "none",
    key_limits: KeyLimits | None = None,
    cors: CorsSettings | None = None,
    request_timeout_s: float | None = None,
    responses_store_bytes: int = 0,
    page: bool = True,
    most_viewers: int = 32,
    has_one_user: bool = False,
    runtime_adapters: bool = False,
) -> ApiSettings:
    return ApiSettings(
        served_model_names=(MODEL, "tiny-alias"),
        api_keys=api_keys,
        share_cache_across_keys=share_cache_across_keys,
        max_request_bytes=max_request_bytes,
        strict_request_fields=strict,
        chat_template=chat_template,
        generation_defaults=generation_defaults or {},
        version="1.2.3",
        force_include_usage=force_include_usage,
        per_request_metrics=per_request_metrics,
        shorten_max_tokens=shorten_max_tokens,
        max_logprobs=max_logprobs,
        enable_metrics_auth=metrics_auth,
        speculation=speculation or SpeculationConfig(),
        spec_decode_metrics=spec_decode_metrics,
        key_limits=key_limits or KeyLimits(),
        cors=cors or CorsSettings(),
        request_timeout_s=request_timeout_s,
        responses_store_bytes=responses_store_bytes,
        page=page,
        most_viewers=most_viewers,
        has_one_user=has_one_user,
        runtime_adapters=runtime_adapters,
    )


@contextmanager
def serving(
    engine: EngineClient,
    chosen: ApiSettings | None = None,
    config: ServerConfig | None = None,
    *,
    keys: ApiKeys | None = None,
    tracer: Tracer | None = None,
    adapters: Adapters | None = None,
) -> Iterator[str]:
    """The server's URL while it runs.

    config: limits of connections; the defaults suit most tests. keys: instead of those of the settings.
    """
    metrics = Metrics(model_name=MODEL, max_model_len=4096)
    app = create_app(
        engine, settings=chosen or settings(), metrics=metrics, keys=keys, tracer=tracer, adapters=adapters
    )
    with running(http_server(app, config or ServerConfig(disable_uvicorn_access_log=True))) as url:
        yield url


@contextmanager
def running(server: uvicorn.Server) -> Iterator[str]:
    """The URL of any server while it runs in a thread, on a free port."""
    listener = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        scheme = "https" if server.config.is_ssl else "http"
        yield f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        listener.close()


def openai_client(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)


def http_client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=PATIENCE_S)
