"""The routes of Responses: make one, count its prompt, and get or delete one that was kept."""

import time
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from faser.api.answers.framing import Envelope
from faser.api.bodies.errors import HttpError
from faser.api.bodies.fields import UNSUPPORTED_IN_CHATS
from faser.api.bodies.openapi import BODY_ERRORS, GENERATED, PLAIN_ERRORS, answers, json_body
from faser.api.dialects.chat_requests import chat_handler, chat_prompt
from faser.api.dialects.conversion import Json, ignored, renamed_fields
from faser.api.dialects.generation import check_shared_fields
from faser.api.dialects.responses_answers import ResponseFraming
from faser.api.dialects.responses_input import items_of
from faser.api.dialects.responses_requests import (
    FIELD_NAMES,
    UNSUPPORTED_IN_RESPONSES,
    ResponsesBody,
    as_chat,
    repeated,
)
from faser.api.dialects.responses_store import ResponseStore
from faser.api.dialects.responses_tools import read_tools
from faser.api.middleware.keys import get_key_index
from faser.api.requests.service import Service
from faser.errors import RequestError

_PATH = "/v1/responses"
_STORE_FLAG = "--responses-store SIZE turns that on"


def responses_router(service: Service, store: ResponseStore) -> APIRouter:
    """The routes that make responses and count their prompts. store: of responses for later requests."""
    router = APIRouter()

    @router.post(_PATH, openapi_extra=json_body(ResponsesBody), responses=GENERATED)
    async def create_response(http: Request) -> Response:
        body = await service.read(http, ResponsesBody)
        arrival_s = time.monotonic()
        service.fields.check(body.model_extra, UNSUPPORTED_IN_RESPONSES)
        owner, keeps = get_key_index(http.scope), store.keeps and body.store is not False
        if body.store and not store.keeps:
            service.fields.log_ignored(f"store: true ({_STORE_FLAG})")
        tools = read_tools(body.tools or ())
        before = _conversation(store, owner, body.previous_response_id)

        def frame(envelope: Envelope) -> ResponseFraming:
            items = [*before, *items_of(body.input)]
            return ResponseFraming(
                envelope,
                repeated(body, envelope.sampling, stored=keeps),
                tools.by_name,
                response_id=store.new_id() if keeps else None,
                keep=(lambda response: store.put(owner, response, items)) if keeps else None,
            )

        with renamed_fields([*tools.renamed(), *FIELD_NAMES]):
            chat = as_chat(body, tools, before)
            handler = await chat_handler(service, http, chat, arrival_s=arrival_s, frame=frame)
            answer = await handler.respond(http.receive)
        answer.headers.update(ignored(tools.left_out, service.fields))
        return answer

    @router.post(
        f"{_PATH}/input_tokens", openapi_extra=json_body(ResponsesBody), responses=answers(*BODY_ERRORS, 503)
    )
    async def count_input_tokens(http: Request) -> Response:
        body = await service.read(http, ResponsesBody)
        service.fields.check(body.model_extra, UNSUPPORTED_IN_RESPONSES)
        tools = read_tools(body.tools or ())
        before = _conversation(store, get_key_index(http.scope), body.previous_response_id)
        with renamed_fields([*tools.renamed(), *FIELD_NAMES]):
            chat = as_chat(body, tools, before)
            info = check_shared_fields(service, chat, http, UNSUPPORTED_IN_CHATS)
            prompt = await chat_prompt(service, chat, info)
        headers = ignored(tools.left_out, service.fields)
        return JSONResponse(
            {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}, headers=headers
        )

    return router


def stored_responses_router(store: ResponseStore) -> APIRouter:
    """The routes of responses that were kept."""
    router = APIRouter()

    @router.get(f"{_PATH}/{{response_id}}", responses=answers(*PLAIN_ERRORS, 404))
    async def get_response(http: Request, response_id: str) -> Response:
        found = store.get(get_key_index(http.scope), response_id)
        if found is None:
            raise _not_found(store, response_id)
        return Response(found, media_type="application/json")

    @router.delete(f"{_PATH}/{{response_id}}", responses=answers(*PLAIN_ERRORS, 404))
    async def delete_response(http: Request, response_id: str) -> Response:
        if not store.delete(get_key_index(http.scope), response_id):
            raise _not_found(store, response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    return router


def _conversation(store: ResponseStore, owner: int | None, response_id: str | None) -> Sequence[Json]:
    """The items up to and with a response, which a request continues."""
    if response_id is None:
        return ()
    name = "previous_response_id"
    if not store.keeps:
        raise RequestError(
            f"`{name}` is not supported: this server stores no responses ({_STORE_FLAG}); send the whole "
            "conversation as input",
            param=name,
        )
    found = store.conversation(owner, response_id)
    if found is None:
        raise RequestError(
            f"{name} is {response_id[:80]!r}, and there is no such response; send the whole conversation as input",
            param=name,
        )
    return found


def _not_found(store: ResponseStore, response_id: str) -> HttpError:
    because = "" if store.keeps else f"; this server stores none ({_STORE_FLAG})"
    return HttpError(404, f"there is no response {response_id[:80]!r}{because}", param="response_id")
