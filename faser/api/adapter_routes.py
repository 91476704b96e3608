"""Routes that load and unload LoRA adapters while the server runs, as vLLM has them."""

from http import HTTPStatus

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import PlainTextResponse, Response

from faser.api.bodies.errors import HttpError
from faser.api.bodies.fields import OPEN, Flag, Integer
from faser.api.bodies.openapi import BODY_ERRORS, answers, json_body
from faser.api.requests.service import Service

_ERRORS = (403, *BODY_ERRORS)


class LoadAdapterBody(BaseModel):
    """load_inplace: the name may be taken by another adapter, which this one replaces."""

    model_config = OPEN

    lora_name: str
    lora_path: str
    load_inplace: Flag | None = None


class UnloadAdapterBody(BaseModel):
    """lora_int_id: vLLM's number of an adapter, which has no meaning here."""

    model_config = OPEN

    lora_name: str
    lora_int_id: Integer | None = None


def adapters_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/load_lora_adapter",
        openapi_extra=json_body(LoadAdapterBody),
        responses=answers(*_ERRORS, content="text/plain"),
        response_class=PlainTextResponse,
    )
    async def load(http: Request) -> Response:
        _check_allowed(service)
        body = await service.read(http, LoadAdapterBody)
        service.fields.check(body.model_extra, {})
        await service.adapters.load(body.lora_name, body.lora_path, replaces=bool(body.load_inplace))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post(
        "/v1/unload_lora_adapter",
        openapi_extra=json_body(UnloadAdapterBody),
        responses=answers(*_ERRORS, content="text/plain"),
        response_class=PlainTextResponse,
    )
    async def unload(http: Request) -> Response:
        _check_allowed(service)
        body = await service.read(http, UnloadAdapterBody)
        service.fields.check(body.model_extra, {})
        await service.adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router


def _check_allowed(service: Service) -> None:
    if not service.settings.runtime_adapters:
        raise HttpError(
            HTTPStatus.FORBIDDEN,
            "clients may not change this server's adapters; start it with --allow-runtime-lora-updating",
        )
