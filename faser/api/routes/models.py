"""GET /v1/models, /v1/models/{id}, /version and /load."""

from typing import Any

from fastapi import APIRouter

from faser.api.routes.openapi import PLAIN_ERRORS, answers
from faser.api.serving.service import Service


def models_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models", responses=answers(*PLAIN_ERRORS, 503))
    async def list_models() -> dict[str, Any]:
        names = service.settings.served_model_names
        return {"object": "list", "data": [_card(service, name) for name in names]}

    @router.get("/v1/models/{model:path}", responses=answers(*PLAIN_ERRORS, 404, 503))
    async def get_model(model: str) -> dict[str, Any]:
        return _card(service, service.model_name(model))

    @router.get("/version", responses=answers(*PLAIN_ERRORS))
    async def get_version() -> dict[str, str]:
        return {"version": service.settings.version}

    @router.get("/load", responses=answers(*PLAIN_ERRORS))
    async def get_load() -> dict[str, int]:
        """As vLLM: HTTP requests that generate now."""
        return {"server_load": service.in_progress.count}

    return router


def _card(service: Service, name: str) -> dict[str, Any]:
    """Raises NotReadyError while the model is being loaded: max_model_len is not known yet."""
    return {
        "id": name,
        "object": "model",
        "created": service.created_s,
        "owned_by": "faser",
        "root": service.settings.model or service.settings.served_model_names[0],
        "parent": None,
        "max_model_len": service.engine.info.max_model_len,
    }
