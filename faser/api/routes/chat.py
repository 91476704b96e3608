"""POST /v1/chat/completions."""

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from faser.api.protocol.body import read_body
from faser.api.protocol.chat import ChatBody
from faser.api.routes.openapi import GENERATED, json_body
from faser.api.serving.chat_request import chat_handler
from faser.api.serving.service import Service


def chat_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=json_body(ChatBody), responses=GENERATED)
    async def create_chat_completion(http: Request) -> Response:
        return await answer_chat(
            service, http, await read_body(http, ChatBody, max_bytes=service.settings.max_request_bytes)
        )

    return router


async def answer_chat(service: Service, http: Request, body: ChatBody) -> Response:
    handler = await chat_handler(service, http, body, arrival_s=time.monotonic())
    return await handler.respond(http)
