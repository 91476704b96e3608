"""POST /v1/responses."""

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from faser.api.dialects.conversion import renamed_fields
from faser.api.dialects.responses.body import UNSUPPORTED_IN_RESPONSES, ResponsesBody
from faser.api.dialects.responses.chat_conversion import FIELD_NAMES, as_chat
from faser.api.dialects.responses.response_framing import ResponseFraming
from faser.api.protocol.body import read_body
from faser.api.routes.openapi import GENERATED, json_body
from faser.api.serving.chat_request import chat_handler
from faser.api.serving.service import Service


def responses_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/responses", openapi_extra=json_body(ResponsesBody), responses=GENERATED)
    async def create_response(http: Request) -> Response:
        body = await read_body(http, ResponsesBody, max_bytes=service.settings.max_request_bytes)
        arrival_s = time.monotonic()
        service.fields.check(body.model_extra, UNSUPPORTED_IN_RESPONSES)
        chat = as_chat(body)
        with renamed_fields(FIELD_NAMES):
            handler = await chat_handler(
                service, http, chat, arrival_s=arrival_s, frame=lambda envelope: ResponseFraming(envelope, body)
            )
            return await handler.respond(http)

    return router
