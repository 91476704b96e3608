"""GET /metrics."""

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from faser.api.routes.openapi import PLAIN_ERRORS, answers
from faser.api.serving.service import Service
from faser.metrics.server import CONTENT_TYPE


def metrics_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.head("/metrics", include_in_schema=False)
    @router.get(
        "/metrics", responses=answers(*PLAIN_ERRORS, content="text/plain"), response_class=PlainTextResponse
    )
    async def get_metrics() -> Response:
        return Response(service.metrics.render(), media_type=CONTENT_TYPE)

    return router
