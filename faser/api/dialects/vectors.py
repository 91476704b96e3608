"""Vectors of prompts for the routes that answer with numbers: from tokens to requests to arrays."""

import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing

import numpy as np
from fastapi import Request as HttpRequest
from pydantic import BaseModel, Field

from faser.api.answers.handler import merged, while_connected
from faser.api.bodies.fields import OPEN, Flag, Integer, Number
from faser.api.dialects.generation import deadline_of
from faser.api.middleware.key_limits import use_tokens
from faser.api.middleware.keys import get_key_identity, tenant_of
from faser.api.middleware.outer import get_request_id, set_request_id
from faser.api.requests.embedding import NO_DRAFTS, Floats, params_of
from faser.api.requests.prompts import Source, TokenizationRules, TokenizedPrompt, tokenize_prompts
from faser.api.requests.service import Service
from faser.errors import RequestError
from faser.types.engine import ModelInfo
from faser.types.pooling import Pooling
from faser.types.request import Request


class PoolingBody(BaseModel):
    """The fields that all routes for vectors have."""

    model_config = OPEN

    model: str | None = None
    truncate_prompt_tokens: Integer | None = None
    add_special_tokens: Flag | None = None
    request_id: str | None = None
    priority: Integer | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    timeout: Number | None = None
    user: str | None = None


def check_body(service: Service, body: PoolingBody, http: HttpRequest) -> ModelInfo:
    """Check the fields that concern no prompt, and that the engine is ready.

    Raises RequestError, or NotReadyError if the engine accepts no requests now.
    """
    service.fields.check(body.model_extra, {})
    if body.request_id is not None:
        set_request_id(http.scope, body.request_id, "request_id")
    service.model_name(body.model)
    return service.ready_info()


async def tokenized(
    service: Service,
    body: PoolingBody,
    info: ModelInfo,
    sources: Sequence[Source],
    field: str,
    *,
    add_special_tokens: bool = True,
) -> list[TokenizedPrompt]:
    """Tokenise prompts. field: of the body, from which they come. add_special_tokens: the route's default.

    Raises RequestError.
    """
    truncate, most = body.truncate_prompt_tokens, service.engine.max_samples
    if len(sources) > most:
        raise RequestError(
            f"{field} has {len(sources)} texts; this server holds at most {most} at a time", param=field
        )
    rules = TokenizationRules(
        limit=info.max_model_len,
        field=field,
        add_special_tokens=add_special_tokens if body.add_special_tokens is None else body.add_special_tokens,
        truncate=info.max_model_len if truncate == -1 else truncate,
        keeps_start=True,
    )
    return await tokenize_prompts(sources, service.engine.tokenizer, rules, service.text_worker)


async def pool(
    service: Service,
    body: PoolingBody,
    http: HttpRequest,
    prompts: Sequence[TokenizedPrompt],
    pooling: Pooling,
    field: str,
) -> Floats:
    """Return the vector of each prompt, [N, D]. All are computed, or none.

    Raises FaserError, or ClientDisconnect. In both cases all requests have been aborted.
    """
    scope, arrival_s = http.scope, time.monotonic()
    unique = uuid.uuid4().hex[:12]
    namespace = service.namespaces.name(get_key_identity(scope), body.cache_salt)
    adapter = service.adapter(body.model)
    deadline_s = deadline_of(body.timeout, scope, service.settings.request_timeout_s, arrival_s)
    requests = [
        Request(
            request_id=f"{get_request_id(scope)}-{unique}-{index}",
            prompt_token_ids=prompt.token_ids,
            sampling=params_of(pooling, prompt.second_from),
            priority=body.priority or 0,
            arrival_s=arrival_s,
            adapter=adapter,
            cache_salt=namespace,
            shares_cache=namespace is None,
            speculation=NO_DRAFTS,
            tenant=tenant_of(scope, unique),
            deadline_s=deadline_s,
            may_record=False,
        )
        for index, prompt in enumerate(prompts)
    ]

    async def gather() -> Floats:
        found: dict[int, bytes] = {}
        async with service.submitted(requests, field=field) as readers, aclosing(merged(readers)) as outputs:
            use_tokens(scope, count_tokens(prompts))
            async for index, output in outputs:
                if output.pooled is not None:
                    found[index] = output.pooled
        return np.frombuffer(b"".join(found[i] for i in range(len(requests))), np.float32).reshape(len(found), -1)

    return await while_connected(gather(), http.receive)


def count_tokens(prompts: Sequence[TokenizedPrompt]) -> int:
    """Count the tokens of all prompts."""
    return sum(len(each.token_ids) for each in prompts)


def usage(prompts: Sequence[TokenizedPrompt]) -> dict[str, int]:
    """Return the usage of an answer without tokens."""
    count = count_tokens(prompts)
    return {"prompt_tokens": count, "total_tokens": count}
