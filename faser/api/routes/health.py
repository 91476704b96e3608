"""GET /health and /ping (shall this process live?) and /ready (shall it get requests?)."""

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from faser.api.service import Service
from faser.types import EngineState

# A draining server is healthy: it must not be restarted before its last answers are out.
_HEALTHY = (EngineState.READY, EngineState.DRAINING)


def health_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)
    @router.get("/health")
    async def get_health() -> Response:
        return Response(status_code=200 if service.engine.state in _HEALTHY else 503)

    @router.get("/ready")
    async def get_ready() -> Response:
        state = service.engine.state
        if state is EngineState.READY:
            return JSONResponse({"ready": True})
        answer: dict[str, Any] = {"ready": False, "reason": state.value}
        if service.engine.state_reason:
            answer["message"] = service.engine.state_reason
        return JSONResponse(answer, 503)

    return router
