"""GET /health and /ping (should the process be restarted?) and /ready (does it accept requests?)."""

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from faser.api.serving.service import Service
from faser.types import EngineState

# An orchestrator must not end the process while the server itself starts a dead engine again, nor while it drains.
# During the first load /health fails, as start probes expect.
_HEALTHY = (EngineState.READY, EngineState.RESTARTING, EngineState.DRAINING)


_PROBE: dict[int | str, dict[str, Any]] = {
    200: {"description": "Yes."},
    503: {"description": "No; the body says why."},
}


def health_router(service: Service) -> APIRouter:
    router = APIRouter()
    engine = service.engine

    def message() -> dict[str, str]:
        """The reason for the engine's state, if there is one."""
        return {"message": engine.state_reason} if engine.state_reason else {}

    @router.api_route("/ping", methods=["GET", "HEAD", "POST"], include_in_schema=False)
    @router.head("/health", include_in_schema=False)
    @router.get("/health", responses=_PROBE)
    async def get_health() -> Response:
        status = 200 if engine.state in _HEALTHY else 503
        return JSONResponse({"state": engine.state.value, **message()}, status)

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", responses=_PROBE)
    async def get_ready() -> Response:
        if engine.state is EngineState.READY:
            return JSONResponse({"ready": True})
        return JSONResponse({"ready": False, "reason": engine.state.value, **message()}, 503)

    return router
