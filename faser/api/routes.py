"""Routes of no dialect: probes, metrics, models, tokenize and detokenize, and /invocations."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, PlainTextResponse, Response

from faser.api.bodies.body import parse_body, read_bytes
from faser.api.bodies.chat import TOOLS, ChatBody, Tool
from faser.api.bodies.fields import LIST, OPEN, UNSUPPORTED_IN_TOKENIZE, Flag
from faser.api.bodies.openapi import BODY_ERRORS, GENERATED, PLAIN_ERRORS, answers, json_body
from faser.api.dialects.chat_requests import answer_chat
from faser.api.dialects.completions_requests import CompletionBody, answer_completion
from faser.api.requests.prompts import count_chars, encode, excess
from faser.api.requests.service import Service
from faser.errors import RequestError
from faser.metrics.server import CONTENT_TYPE
from faser.optional import or_else, present
from faser.types.engine import EngineState

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


def metrics_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.head("/metrics", include_in_schema=False)
    @router.get(
        "/metrics", responses=answers(*PLAIN_ERRORS, content="text/plain"), response_class=PlainTextResponse
    )
    async def get_metrics() -> Response:
        return Response(service.metrics.render(), media_type=CONTENT_TYPE)

    return router


def models_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models", responses=answers(*PLAIN_ERRORS, 503))
    async def list_models() -> dict[str, Any]:
        names = (*service.settings.served_model_names, *(each.adapter.name for each in service.adapters))
        return {"object": "list", "data": [_card(service, name) for name in names]}

    @router.get("/v1/models/{model:path}", responses=answers(*PLAIN_ERRORS, 404, 503))
    async def get_model(model: str) -> dict[str, Any]:
        return _card(service, service.model_name(model))

    @router.get("/version", responses=answers(*PLAIN_ERRORS))
    async def get_version() -> dict[str, str]:
        return {"version": service.settings.version}

    @router.get("/load", responses=answers(*PLAIN_ERRORS))
    async def get_load() -> dict[str, int]:
        """Return, as vLLM does, the number of HTTP requests that generate now."""
        return {"server_load": service.num_in_progress}

    return router


def _card(service: Service, name: str) -> dict[str, Any]:
    """Raises NotReadyError while the model is being loaded: max_model_len is not known yet."""
    served = service.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": served.created_s if served else service.created_s,
        "owned_by": "faser",
        "root": served.adapter.path
        if served
        else service.settings.model or service.settings.served_model_names[0],
        "parent": served.parent if served else None,
        "max_model_len": service.engine.info.max_model_len,
    }


class TokenizeBody(BaseModel):
    """Either a prompt or messages. add_special_tokens: by default true for a prompt, false for messages."""

    model_config = OPEN

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = LIST
    add_special_tokens: Flag | None = None
    return_token_strs: Flag | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = TOOLS


class DetokenizeBody(BaseModel):
    """Token ids to convert to text, special tokens included."""

    model_config = OPEN

    model: str | None = None
    tokens: list[int] = Field(fail_fast=True)


def tokenize_router(service: Service) -> APIRouter:
    router = APIRouter()
    tokenizer = service.engine.tokenizer

    @router.post("/tokenize", openapi_extra=json_body(TokenizeBody), responses=answers(*BODY_ERRORS))
    async def tokenize(http: Request) -> Response:
        body = await service.read(http, TokenizeBody)
        service.fields.check(body.model_extra, UNSUPPORTED_IN_TOKENIZE)
        service.model_name(body.model)
        max_model_len = service.engine.info.max_model_len
        _check_either(body)
        field = "messages" if body.prompt is None else "prompt"
        special = or_else(body.add_special_tokens, field == "prompt")

        def answer() -> bytes:
            text = _text(service, body)
            if (size := excess(text, tokenizer, max_model_len)) is not None:
                raise RequestError(
                    f"{field} has {size}; it must not exceed the model's context, {max_model_len} tokens",
                    param=field,
                )
            tokens = encode(text, tokenizer, field=field, add_special_tokens=special)
            fields: dict[str, Any] = {
                "count": len(tokens),
                "max_model_len": max_model_len,
                "tokens": tokens,
                "token_strs": [tokenizer.token(each) for each in tokens] if body.return_token_strs else None,
            }
            return msgspec.json.encode(fields)

        num_chars = count_chars((body.prompt, body.messages, body.chat_template_kwargs))
        return Response(await service.text_worker.run(num_chars, answer), media_type="application/json")

    @router.post("/detokenize", openapi_extra=json_body(DetokenizeBody), responses=answers(*BODY_ERRORS))
    async def detokenize(http: Request) -> Response:
        body = await service.read(http, DetokenizeBody)
        service.fields.check(body.model_extra, {})
        service.model_name(body.model)
        most = tokenizer.max_chars(service.engine.info.max_model_len)
        if len(body.tokens) > most:
            raise RequestError(f"tokens has {len(body.tokens)} ids; at most {most} are allowed", param="tokens")

        def answer() -> bytes:
            _check_ids(body.tokens, tokenizer.vocab_size)
            return msgspec.json.encode({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})

        return Response(await service.text_worker.run(len(body.tokens), answer), media_type="application/json")

    return router


def _text(service: Service, body: TokenizeBody) -> str:
    if body.prompt is not None:
        return body.prompt
    return service.chat_renderer.render(
        body.messages or [],
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=body.chat_template_kwargs,
        template_fields={},
        tools=[tool.model_dump(exclude_unset=True) for tool in body.tools or ()],
    )


def _check_either(body: TokenizeBody) -> None:
    if len(present((body.prompt, body.messages))) != 1:
        raise RequestError("exactly one of prompt and messages must be given", param="prompt")


def _check_ids(token_ids: list[int], vocab_size: int) -> None:
    for at, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"tokens.{at} is {token_id}; it must be at least 0 and at most {vocab_size - 1}",
                param=f"tokens.{at}",
            )


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
        if len(present((body.messages, body.prompt))) != 1:
            raise RequestError("exactly one of messages and prompt must be given", param="messages")
        if body.prompt is None:
            return await answer_chat(service, http, await parse_body(raw, ChatBody))
        return await answer_completion(service, http, await parse_body(raw, CompletionBody))

    return router
