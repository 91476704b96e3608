"""POST /v1/messages and /v1/messages/count_tokens."""

import time

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from faser.api.dialects.conversion import renamed_fields
from faser.api.dialects.messages.body import UNSUPPORTED_IN_MESSAGES, CountTokensBody, MessagesBody
from faser.api.dialects.messages.chat_conversion import FIELD_NAMES, as_chat, conversation
from faser.api.dialects.messages.message_framing import MessageFraming
from faser.api.protocol.body import read_body
from faser.api.routes.openapi import BODY_ERRORS, GENERATED, answers, json_body
from faser.api.serving.chat_request import chat_handler, chat_prompt
from faser.api.serving.service import Service


def messages_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/messages", openapi_extra=json_body(MessagesBody), responses=GENERATED)
    async def create_message(http: Request) -> Response:
        body = await read_body(http, MessagesBody, max_bytes=service.settings.max_request_bytes)
        arrival_s = time.monotonic()
        service.fields.check(body.model_extra, UNSUPPORTED_IN_MESSAGES)
        chat = as_chat(body)
        with renamed_fields(FIELD_NAMES):
            handler = await chat_handler(service, http, chat, arrival_s=arrival_s, frame=MessageFraming)
            return await handler.respond(http)

    @router.post(
        "/v1/messages/count_tokens", openapi_extra=json_body(CountTokensBody), responses=answers(*BODY_ERRORS)
    )
    async def count_tokens(http: Request) -> Response:
        body = await read_body(http, CountTokensBody, max_bytes=service.settings.max_request_bytes)
        service.fields.check(body.model_extra, UNSUPPORTED_IN_MESSAGES)
        service.model_name(body.model)
        chat = conversation(body)
        with renamed_fields(FIELD_NAMES):
            prompt = await chat_prompt(service, chat, service.engine.info)
        answer = msgspec.json.encode({"input_tokens": len(prompt.token_ids)})
        return Response(answer, media_type="application/json")

    return router
