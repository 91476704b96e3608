"""POST /v1/chat/completions/render and /v1/completions/render: the tokens of a request's prompts, and no answer.

Routers ask for them to find the replica whose cache holds the longest beginning of a prompt. The body is that of
the route without /render, checked in the same way. Names are vLLM's.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from faser.api.bodies.chat import ChatBody
from faser.api.bodies.fields import UNSUPPORTED_IN_CHATS, UNSUPPORTED_IN_COMPLETIONS
from faser.api.bodies.openapi import BODY_ERRORS, answers, json_body
from faser.api.dialects.chat_requests import chat_prompt
from faser.api.dialects.completions_requests import CompletionBody, completion_prompts
from faser.api.dialects.generation import check_shared_fields
from faser.api.middleware.outer import get_request_id
from faser.api.requests.service import Service


def render_router(service: Service) -> APIRouter:
    router = APIRouter()
    responses = answers(*BODY_ERRORS, 503)

    @router.post("/v1/chat/completions/render", openapi_extra=json_body(ChatBody), responses=responses)
    async def render_chat(http: Request) -> Response:
        body = await service.read(http, ChatBody)
        info = check_shared_fields(service, body, http, UNSUPPORTED_IN_CHATS)
        prompt = await chat_prompt(service, body, info)
        return _json(_rendered(service, http, body.model, prompt.token_ids))

    @router.post("/v1/completions/render", openapi_extra=json_body(CompletionBody), responses=responses)
    async def render_completion(http: Request) -> Response:
        body = await service.read(http, CompletionBody)
        info = check_shared_fields(service, body, http, UNSUPPORTED_IN_COMPLETIONS)
        prompts = await completion_prompts(service, body, info)
        return _json([_rendered(service, http, body.model, each.token_ids) for each in prompts])

    return router


def _rendered(service: Service, http: Request, model: str | None, token_ids: Sequence[int]) -> dict[str, Any]:
    return {
        "request_id": get_request_id(http.scope),
        "model": service.model_name(model),
        "token_ids": token_ids,
    }


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
