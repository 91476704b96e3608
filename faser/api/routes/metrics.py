"""GET /metrics."""

from fastapi import APIRouter
from starlette.responses import Response

from faser.api.serving.service import Service
from faser.metrics.server import CONTENT_TYPE


def metrics_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.head("/metrics", include_in_schema=False)
    @router.get("/metrics")
    async def get_metrics() -> Response:
        return Response(service.metrics.render(), media_type=CONTENT_TYPE)

    return router
