"""POST /tokenize and /detokenize. Both need only the tokenizer, so they also answer while the engine drains."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from faser.api.protocol.body import read_body
from faser.api.protocol.tokenize import DetokenizeBody, TokenizeBody
from faser.api.protocol.unsupported_fields import UNSUPPORTED_IN_TOKENIZE
from faser.api.routes.openapi import BODY_ERRORS, answers, json_body
from faser.api.serving.requests.prompts import encode, excess
from faser.api.serving.requests.text_worker import count_chars
from faser.api.serving.service import Service
from faser.errors import RequestError


def tokenize_router(service: Service) -> APIRouter:
    router = APIRouter()
    tokenizer = service.engine.tokenizer

    @router.post("/tokenize", openapi_extra=json_body(TokenizeBody), responses=answers(*BODY_ERRORS))
    async def tokenize(http: Request) -> Response:
        body = await read_body(http, TokenizeBody, max_bytes=service.settings.max_request_bytes)
        service.fields.check(body.model_extra, UNSUPPORTED_IN_TOKENIZE)
        service.model_name(body.model)
        max_model_len = service.engine.info.max_model_len
        special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
        _check_either(body)

        def answer() -> bytes:
            text = _text(service, body)
            field = "messages" if body.prompt is None else "prompt"
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
        body = await read_body(http, DetokenizeBody, max_bytes=service.settings.max_request_bytes)
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


def _check_ids(token_ids: list[int], vocab_size: int) -> None:
    for at, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"tokens.{at} is {token_id}; it must be at least 0 and at most {vocab_size - 1}",
                param=f"tokens.{at}",
            )


def _check_either(body: TokenizeBody) -> None:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("exactly one of prompt and messages must be given", param="prompt")


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
