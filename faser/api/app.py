"""create_app: puts routes, middleware and error handlers together. Knows no model and loads no torch."""

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig
from starlette.middleware.cors import CORSMiddleware

from faser.api.adapter_routes import adapters_router
from faser.api.bodies.errors import add_error_handlers
from faser.api.bodies.openapi import document, include
from faser.api.dialects.chat_requests import chat_router
from faser.api.dialects.completions_requests import completions_router
from faser.api.dialects.conversion import IGNORED_HEADER
from faser.api.dialects.embeddings import embeddings_router
from faser.api.dialects.messages_requests import messages_router
from faser.api.dialects.render import render_router
from faser.api.dialects.rerank import rerank_router
from faser.api.dialects.responses_routes import responses_router
from faser.api.http.paths import PathMiddleware
from faser.api.middleware.hosts import AllowedHosts, HostMiddleware
from faser.api.middleware.key_limits import KeyLimitsMiddleware
from faser.api.middleware.keys import ApiKeyMiddleware, ApiKeys
from faser.api.middleware.outer import REQUEST_ID_HEADER, RequestIdMiddleware, UnreadBodyMiddleware
from faser.api.middleware.tracing import TracingMiddleware
from faser.api.page.files import PageFiles, page_router
from faser.api.page.live_feed import LIVE_ROUTE, live_router
from faser.api.requests.adapters import Adapters, no_adapters
from faser.api.requests.service import ApiSettings, EngineClient, Service
from faser.api.routes import health_router, invocations_router, metrics_router, models_router, tokenize_router
from faser.metrics.replicas import ServerMetrics
from faser.metrics.server import KEY_LIMIT
from faser.tracing import Tracer

__all__ = ["ApiSettings", "create_app"]

# FastAPI's own, which would log the exceptions of requests and make a span of each of their parts.
_NO_TELEMETRY = TelemetryConfig(tracing=False, metrics=False, logs=False, auto_configure=False)

_ROUTERS = (
    chat_router,
    completions_router,
    embeddings_router,
    rerank_router,
    render_router,
    invocations_router,
    responses_router,
    messages_router,
    models_router,
    adapters_router,
    health_router,
    tokenize_router,
    metrics_router,
)


def create_app(
    engine: EngineClient,
    *,
    settings: ApiSettings,
    metrics: ServerMetrics,
    keys: ApiKeys | None = None,
    tracer: Tracer | None = None,
    adapters: Adapters | None = None,
) -> FastAPI:
    """The application; the engine may still be loading. Raises ModelError for a broken chat template.

    keys: that requests may present, for a caller that replaces them later; None: those of the settings.
    tracer: makes a span of each request for an answer; None: there are no traces. adapters: that requests may
    name; None: there are none.
    """
    keys = ApiKeys(settings.api_keys) if keys is None else keys
    service = Service(engine, settings, metrics, adapters or no_adapters(engine, settings.served_model_names))
    app = FastAPI(title="FASER", version=settings.version, redirect_slashes=False, telemetry=_NO_TELEMETRY)
    app.openapi = lambda: document(app, max_logprobs=settings.max_logprobs)  # type: ignore[method-assign]
    for router in _ROUTERS:
        include(app, router(service))
    page = PageFiles() if settings.page else None
    if page is not None:
        include(app, page_router(page))
        include(app, live_router(service, keys))
    add_error_handlers(app)
    if settings.key_limits.any:  # a middleware added later is further out
        app.add_middleware(
            KeyLimitsMiddleware,
            limits=settings.key_limits,
            on_refused=lambda: metrics.rejected(KEY_LIMIT),
            free_routes=frozenset({LIVE_ROUTE}),
        )
    if tracer is not None:
        app.add_middleware(TracingMiddleware, tracer=tracer)
    app.add_middleware(
        ApiKeyMiddleware,
        keys=keys,
        open_metrics=not settings.enable_metrics_auth,
        open_routes=frozenset() if page is None else page.routes,
    )
    if not keys.required and "*" not in settings.cors.origins:
        app.add_middleware(
            HostMiddleware, hosts=AllowedHosts(settings.allowed_hosts), origins=settings.cors.origins
        )
    if settings.cors.origins:  # outside of the keys: preflights have none, and pages can read a 401
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors.origins,
            allow_methods=settings.cors.methods,
            allow_headers=settings.cors.headers,
            allow_credentials=settings.cors.credentials,
            expose_headers=(REQUEST_ID_HEADER, "Retry-After", IGNORED_HEADER),
        )
    app.add_middleware(RequestIdMiddleware)
    app.add_middleware(PathMiddleware)
    app.add_middleware(UnreadBodyMiddleware)  # added last, so outermost
    return app
