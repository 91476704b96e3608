"""create_app: puts routes, middleware and error handlers together. Knows no model and loads no torch."""

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig

from faser.api.middleware.api_keys import ApiKeys
from faser.api.middleware.auth import ApiKeyMiddleware
from faser.api.middleware.cors import add_cors
from faser.api.middleware.key_limits import KeyLimitsMiddleware
from faser.api.middleware.paths import PathMiddleware
from faser.api.middleware.request_id import RequestIdMiddleware
from faser.api.middleware.unread_body import UnreadBodyMiddleware
from faser.api.page.files import PageFiles
from faser.api.protocol.errors import add_error_handlers
from faser.api.routes.chat import chat_router
from faser.api.routes.completions import completions_router
from faser.api.routes.health import health_router
from faser.api.routes.invocations import invocations_router
from faser.api.routes.live import LIVE_ROUTE, live_router
from faser.api.routes.messages import messages_router
from faser.api.routes.metrics import metrics_router
from faser.api.routes.models import models_router
from faser.api.routes.openapi import document
from faser.api.routes.page import page_router
from faser.api.routes.responses import responses_router
from faser.api.routes.tokenize import tokenize_router
from faser.api.serving.engine_client import EngineClient
from faser.api.serving.requests.settings import ApiSettings
from faser.api.serving.service import Service
from faser.api.tracing.middleware import TracingMiddleware
from faser.metrics.server import KEY_LIMIT, Metrics
from faser.tracing import Tracer

__all__ = ["ApiSettings", "create_app"]

# FastAPI's own, which would log the exceptions of requests and make a span of each of their parts.
_NO_TELEMETRY = TelemetryConfig(tracing=False, metrics=False, logs=False, auto_configure=False)

_ROUTERS = (
    chat_router,
    completions_router,
    invocations_router,
    responses_router,
    messages_router,
    models_router,
    health_router,
    tokenize_router,
    metrics_router,
)


def create_app(
    engine: EngineClient,
    *,
    settings: ApiSettings,
    metrics: Metrics,
    keys: ApiKeys | None = None,
    tracer: Tracer | None = None,
) -> FastAPI:
    """The application; the engine may still be loading. Raises ModelError for a broken chat template.

    keys: that requests may present, for a caller that replaces them later; None: those of the settings.
    tracer: makes a span of each request for an answer; None: there are no traces.
    """
    keys = ApiKeys(settings.api_keys) if keys is None else keys
    service = Service.build(engine, settings, metrics)
    app = FastAPI(title="FASER", version=settings.version, redirect_slashes=False, telemetry=_NO_TELEMETRY)
    app.openapi = lambda: document(app)  # type: ignore[method-assign]
    for router in _ROUTERS:
        app.include_router(router(service))
    page = PageFiles() if settings.page else None
    if page is not None:
        app.include_router(page_router(page))
        app.include_router(live_router(service, keys))
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
    add_cors(app, settings.cors)  # outside of the keys: preflights have none, and pages can read a 401
    app.add_middleware(RequestIdMiddleware)
    app.add_middleware(PathMiddleware)
    app.add_middleware(UnreadBodyMiddleware)  # added last, so outermost
    return app
