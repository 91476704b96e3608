"""POST /v1/completions: its body, whose prompt has four forms, and the way from it to the answer."""

import time
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from faser.api.answers.framing import TokenFormatter
from faser.api.bodies.body import shown
from faser.api.bodies.fields import UNSUPPORTED_IN_COMPLETIONS, Flag, GenerationBody, Integer
from faser.api.bodies.openapi import GENERATED, json_body
from faser.api.dialects.completions_answers import CompletionFormatter
from faser.api.dialects.generation import (
    build_handler,
    check_capacity,
    check_shared_fields,
    read_stream_options,
    tokenization_rules,
)
from faser.api.requests.prompts import TokenizedPrompt, tokenize_prompts
from faser.api.requests.sampling import check_alternatives, sampling_params, server_default
from faser.api.requests.service import ApiSettings, Service
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import RequestError
from faser.types.engine import ModelInfo
from faser.types.sampling import SamplingParams

MAX_PROMPTS = 2048

_FORMS = "it must be a string, a list of strings, a list of token ids, or a list of such lists"


class CompletionBody(GenerationBody):
    """The shared fields, and those of completions only. logprobs: number of alternatives; 0: the chosen token."""

    prompt: Any
    max_tokens: Integer | None = Field(None, json_schema_extra={"minimum": 0})
    logprobs: Integer | None = None
    echo: Flag | None = None


def completions_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", openapi_extra=json_body(CompletionBody), responses=GENERATED)
    async def create_completion(http: Request) -> Response:
        return await answer_completion(service, http, await service.read(http, CompletionBody))

    return router


async def answer_completion(service: Service, http: Request, body: CompletionBody) -> Response:
    arrival_s = time.monotonic()
    info = check_shared_fields(service, body, http, UNSUPPORTED_IN_COMPLETIONS)
    read_stream_options(body, force_usage=False)
    tokenizer = service.engine.tokenizer
    sampling = _sampling(body, service.settings, tokenizer)
    prompts = await completion_prompts(service, body, info, sampling)
    formatter = CompletionFormatter(
        token_formatter=TokenFormatter(tokenizer=tokenizer, as_ids=bool(body.return_tokens_as_token_ids)),
        echo=bool(body.echo),
        logprobs=body.logprobs is not None,
        skip_special_tokens=sampling.skip_special_tokens,
        return_token_ids=bool(body.return_token_ids),
        asks_prompt_logprobs=body.prompt_logprobs is not None,
    )
    handler = await build_handler(service, http, body, formatter, prompts, sampling, arrival_s)
    return await handler.respond(http.receive)


async def completion_prompts(
    service: Service, body: CompletionBody, info: ModelInfo, sampling: SamplingParams | None = None
) -> list[TokenizedPrompt]:
    """The prompts as token ids. sampling: what is to be answered, if anything; the server must hold it."""
    rules = tokenization_rules(body, info, field=CompletionFormatter.prompt_field, add_special_tokens=True)
    sources = read_prompts(body.prompt)
    if sampling is not None:
        check_capacity(service, len(sources), sampling)
    return await tokenize_prompts(sources, service.engine.tokenizer, rules, service.text_worker)


def _sampling(body: CompletionBody, settings: ApiSettings, tokenizer: Tokenizer) -> SamplingParams:
    """Raises RequestError. echo with logprobs asks for the prompt's as well."""
    check_alternatives("logprobs", body.logprobs, settings)
    max_tokens = int(server_default("max_tokens", settings)) if body.max_tokens is None else body.max_tokens
    if max_tokens < 1 and not (max_tokens == 0 and (body.echo or body.prompt_logprobs is not None)):
        raise RequestError(
            f"max_tokens is {max_tokens}; it must be at least 1, or 0 with echo or prompt_logprobs",
            param="max_tokens",
        )
    return sampling_params(
        body, settings, tokenizer, max_tokens=max_tokens, logprobs=body.logprobs, scores_prompt=bool(body.echo)
    )


def read_prompts(prompt: Any, field: str = "prompt") -> list[str | list[int]]:
    """One entry per prompt, in order. field: of the body. Raises RequestError that names the wrong element."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise RequestError(f"{field} is {shown(prompt)}; {_FORMS}", param=field)
    if not prompt:
        raise RequestError(f"{field} is an empty list; {_FORMS}", param=field)
    if len(prompt) > MAX_PROMPTS and type(prompt[0]) is not int:
        raise RequestError(f"{field} has {len(prompt)} prompts; at most {MAX_PROMPTS} are allowed", param=field)
    match prompt[0]:
        case str():
            _check_elements(prompt, str, field)
            return prompt
        case list():
            _check_elements(prompt, list, field)
            for at, token_ids in enumerate(prompt):
                _check_elements(token_ids, int, f"{field}.{at}")
            return prompt
        case _:
            _check_elements(prompt, int, field)
            return [prompt]


def _check_elements(elements: list[Any], kind: type, path: str) -> None:
    if set(map(type, elements)) <= {kind}:  # fast enough for millions of token ids
        return
    wrong = next(at for at, element in enumerate(elements) if type(element) is not kind)
    raise RequestError(f"{path}.{wrong} is {shown(elements[wrong])}; {_FORMS}", param=f"{path}.{wrong}")
