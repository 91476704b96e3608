"""POST /invocations, where SageMaker sends every request: its fields say what it is."""

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from faser.api.protocol.body import parse_body, read_bytes
from faser.api.protocol.chat import ChatBody
from faser.api.protocol.common import OPEN
from faser.api.protocol.completions import CompletionBody
from faser.api.routes.chat import answer_chat
from faser.api.routes.completions import answer_completion
from faser.api.routes.openapi import GENERATED, json_body
from faser.api.serving.service import Service
from faser.errors import RequestError


class InvocationBody(BaseModel):
    """A body of chats, with messages, or one of completions, with a prompt."""

    model_config = OPEN

    messages: Any = None
    prompt: Any = None


def invocations_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/invocations", openapi_extra=json_body(InvocationBody), responses=GENERATED)
    async def invoke(http: Request) -> Response:
        raw = await read_bytes(http, max_bytes=service.settings.max_request_bytes)
        body = await parse_body(raw, InvocationBody)
        if (body.messages is None) == (body.prompt is None):
            raise RequestError("exactly one of messages and prompt must be given", param="messages")
        if body.prompt is None:
            return await answer_chat(service, http, await parse_body(raw, ChatBody))
        return await answer_completion(service, http, await parse_body(raw, CompletionBody))

    return router
