"""GET /health and /ping (is the process alive?) and /ready (does it accept requests?)."""

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from faser.api.serving.service import Service
from faser.types import EngineState

# A draining server is healthy: an orchestrator must not restart it before it has sent its last answers.
_HEALTHY = (EngineState.READY, EngineState.DRAINING)

# Longer than any step, even one of thousands of rows on a slow machine.
MAX_SILENCE_S = 120.0


def health_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.api_route("/ping", methods=["GET", "HEAD", "POST"], include_in_schema=False)
    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def get_health() -> Response:
        alive = service.engine.state in _HEALTHY and service.engine.silence_s < MAX_SILENCE_S
        return Response(status_code=200 if alive else 503)

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready")
    async def get_ready() -> Response:
        state, silence_s = service.engine.state, service.engine.silence_s
        if silence_s >= MAX_SILENCE_S:
            message = f"the engine has been silent for {silence_s:.0f} s"
            return JSONResponse({"ready": False, "reason": EngineState.DEAD.value, "message": message}, 503)
        if state is EngineState.READY:
            return JSONResponse({"ready": True})
        answer: dict[str, Any] = {"ready": False, "reason": state.value}
        if service.engine.state_reason:
            answer["message"] = service.engine.state_reason
        return JSONResponse(answer, 503)

    return router
