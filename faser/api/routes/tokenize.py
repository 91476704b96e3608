"""POST /tokenize and /detokenize. Both need only the tokenizer, so they also answer while the engine drains."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from faser.api.protocol.body import read_body
from faser.api.protocol.tokenize import DetokenizeBody, TokenizeBody
from faser.api.routes.openapi import json_body
from faser.api.serving.requests.prompts import in_thread_if_long
from faser.api.serving.service import Service
from faser.errors import RequestError


def tokenize_router(service: Service) -> APIRouter:
    router = APIRouter()
    tokenizer = service.engine.tokenizer

    @router.post("/tokenize", openapi_extra=json_body(TokenizeBody))
    async def tokenize(http: Request) -> Response:
        body = await read_body(http, TokenizeBody, max_bytes=service.settings.max_request_bytes)
        service.fields.check(body.model_extra, {})
        service.model_name(body.model)
        max_model_len = service.engine.info.max_model_len
        special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
        text = _text(service, body)

        def answer() -> bytes:
            tokens = tokenizer.encode(text, add_special_tokens=special)
            fields: dict[str, Any] = {
                "count": len(tokens),
                "max_model_len": max_model_len,
                "tokens": tokens,
                "token_strs": [tokenizer.token_text(each) for each in tokens] if body.return_token_strs else None,
            }
            return msgspec.json.encode(fields)

        return Response(await in_thread_if_long(len(text), answer), media_type="application/json")

    @router.post("/detokenize", openapi_extra=json_body(DetokenizeBody))
    async def detokenize(http: Request) -> dict[str, str]:
        body = await read_body(http, DetokenizeBody, max_bytes=service.settings.max_request_bytes)
        service.fields.check(body.model_extra, {})
        service.model_name(body.model)
        for at, token_id in enumerate(body.tokens):
            if not 0 <= token_id < tokenizer.vocab_size:
                raise RequestError(
                    f"tokens.{at} is {token_id}; it must be at least 0 and at most {tokenizer.vocab_size - 1}",
                    param=f"tokens.{at}",
                )
        return {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}

    return router


def _text(service: Service, body: TokenizeBody) -> str:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("exactly one of prompt and messages must be given", param="prompt")
    if body.prompt is not None:
        return body.prompt
    return service.chat_renderer.render(
        body.messages or [],
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=body.chat_template_kwargs,
        template_fields={},
    )
