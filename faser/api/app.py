"""create_app: puts routes, middleware and error handlers together. Knows no model and loads no torch."""

from fastapi import FastAPI

from faser.api.middleware.auth import ApiKeyMiddleware
from faser.api.middleware.request_id import RequestIdMiddleware
from faser.api.middleware.unread_body import UnreadBodyMiddleware
from faser.api.protocol.errors import add_error_handlers
from faser.api.routes.chat import chat_router
from faser.api.routes.completions import completions_router
from faser.api.routes.health import health_router
from faser.api.routes.metrics import metrics_router
from faser.api.routes.models import models_router
from faser.api.routes.tokenize import tokenize_router
from faser.api.serving.engine_client import EngineClient
from faser.api.serving.requests.settings import ApiSettings
from faser.api.serving.service import Service
from faser.metrics.server import Metrics

__all__ = ["ApiSettings", "create_app"]

_ROUTERS = (chat_router, completions_router, models_router, health_router, tokenize_router, metrics_router)


def create_app(engine: EngineClient, *, settings: ApiSettings, metrics: Metrics) -> FastAPI:
    """The application; the engine may still be loading. Raises ModelError for a broken chat template."""
    service = Service.build(engine, settings, metrics)
    app = FastAPI(title="FASER", version=settings.version, docs_url=None, redoc_url=None, redirect_slashes=False)
    for router in _ROUTERS:
        app.include_router(router(service))
    add_error_handlers(app)
    app.add_middleware(ApiKeyMiddleware, keys=settings.api_keys, open_metrics=not settings.enable_metrics_auth)
    app.add_middleware(RequestIdMiddleware)
    app.add_middleware(UnreadBodyMiddleware)  # added last, so outermost
    return app
