"""POST /v1/completions."""

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from faser.api.protocol.body import read_body
from faser.api.protocol.completions import CompletionBody, read_prompts
from faser.api.protocol.unsupported_fields import UNSUPPORTED_IN_COMPLETIONS
from faser.api.routes.openapi import GENERATED, json_body
from faser.api.serving.answers.completion_formatter import CompletionFormatter
from faser.api.serving.answers.logprobs import TokenFormatter
from faser.api.serving.answers.prediction import read_prediction
from faser.api.serving.request_builder import (
    build_handler,
    check_capacity,
    check_shared_fields,
    read_stream_options,
    tokenization_rules,
)
from faser.api.serving.requests.prompts import tokenize_prompts
from faser.api.serving.requests.sampling_params import text_sampling
from faser.api.serving.service import Service


def completions_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra=json_body(CompletionBody), responses=GENERATED)
    async def create_completion(http: Request) -> Response:
        return await answer_completion(
            service, http, await read_body(http, CompletionBody, max_bytes=service.settings.max_request_bytes)
        )

    return router


async def answer_completion(service: Service, http: Request, body: CompletionBody) -> Response:
    arrival_s = time.monotonic()
    info = check_shared_fields(service, body, http, UNSUPPORTED_IN_COMPLETIONS)
    read_stream_options(body, force_usage=False)
    sampling = text_sampling(body, service.settings, service.engine.tokenizer)
    rules = tokenization_rules(body, info, field=CompletionFormatter.prompt_field, add_special_tokens=True)
    sources = read_prompts(body.prompt)
    check_capacity(service, len(sources), sampling)
    prompts = await tokenize_prompts(sources, service.engine.tokenizer, rules, service.text_worker)
    formatter = CompletionFormatter(
        token_formatter=TokenFormatter(
            tokenizer=service.engine.tokenizer, as_ids=bool(body.return_tokens_as_token_ids)
        ),
        echo=bool(body.echo),
        logprobs=body.logprobs is not None,
        skip_special_tokens=sampling.skip_special_tokens,
        return_token_ids=bool(body.return_token_ids),
        asks_prompt_logprobs=body.prompt_logprobs is not None,
    )
    predicted = await read_prediction(
        body.prediction, service.engine.tokenizer, service.text_worker, limit=info.max_model_len
    )
    handler = build_handler(service, http, body, formatter, prompts, sampling, predicted, arrival_s)
    return await handler.respond(http)
