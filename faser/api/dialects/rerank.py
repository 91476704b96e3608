"""POST /rerank and /score, as vLLM, Jina and Cohere have them: how well documents fit a query.

A model that judges (Embedder.score_token_ids) reads query and document together and says yes or no; the score is
the probability of yes. For every other model it is the cosine of two embeddings.
"""

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from faser.api.bodies.body import shown
from faser.api.bodies.fields import Flag, Integer
from faser.api.bodies.openapi import BODY_ERRORS, answers, json_body
from faser.api.dialects.vectors import PoolingBody, check_body, pool, tokenized, usage
from faser.api.middleware.outer import get_request_id
from faser.api.requests.embedding import Floats, compare
from faser.api.requests.prompts import TokenizedPrompt, count_chars
from faser.api.requests.service import Service
from faser.errors import RequestError
from faser.types.engine import ModelInfo


class ScoresBody(PoolingBody):
    """instruction: what a document has to do, for models that judge. use_activation: false gives raw logits."""

    instruction: str | None = None
    use_activation: Flag | None = None


class RerankBody(ScoresBody):
    """top_n: how many of the best documents are listed; 0: all. return_documents: with their texts."""

    query: str
    documents: list[Any] = Field(fail_fast=True)
    top_n: Integer | None = Field(None, ge=0)
    return_documents: Flag | None = None


class ScoreBody(ScoresBody):
    """One text and many, or as many as there are on the other side. queries, documents: other names of them."""

    text_1: Any = None
    text_2: Any = None
    queries: Any = None
    documents: Any = None


def rerank_router(service: Service) -> APIRouter:
    router = APIRouter()
    responses = answers(*BODY_ERRORS, 504)

    async def rerank(http: Request) -> Response:
        body = await service.read(http, RerankBody)
        info = check_body(service, body, http)
        documents = [_text(each, f"documents.{at}") for at, each in enumerate(body.documents)]
        if not documents:
            raise RequestError("documents is empty; it must have at least one text", param="documents")
        scores, prompts = await _scores(service, body, http, info, [body.query], documents, "documents")
        best = np.argsort(-scores, kind="stable")[: body.top_n or len(scores)].tolist()
        with_texts = body.return_documents is not False
        results = [
            {
                "index": at,
                **({"document": {"text": documents[at]}} if with_texts else {}),
                "relevance_score": score,
            }
            for at, score in zip(best, scores[best].tolist(), strict=True)
        ]
        return _json(
            {
                "id": f"rerank-{get_request_id(http.scope)}",
                "model": service.model_name(body.model),
                "usage": usage(prompts),
                "results": results,
            }
        )

    async def score(http: Request) -> Response:
        body = await service.read(http, ScoreBody)
        info = check_body(service, body, http)
        first, second = _side(body, "text_1", "queries"), _side(body, "text_2", "documents")
        if len(first) not in (1, len(second)):
            raise RequestError(
                f"there are {len(first)} texts on one side and {len(second)} on the other; the first side must "
                "have one text, or as many as the second",
                param="text_1" if body.queries is None else "queries",
            )
        scores, prompts = await _scores(service, body, http, info, first, second, "text_2")
        data = [{"index": at, "object": "score", "score": each} for at, each in enumerate(scores.tolist())]
        return _json(
            {
                "id": f"score-{get_request_id(http.scope)}",
                "object": "list",
                "created": int(time.time()),
                "model": service.model_name(body.model),
                "data": data,
                "usage": usage(prompts),
            }
        )

    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        extra = json_body(RerankBody)
        router.post(path, openapi_extra=extra, responses=responses, include_in_schema=path == "/v1/rerank")(rerank)
    for path in ("/v1/score", "/score"):
        extra = json_body(ScoreBody)
        router.post(path, openapi_extra=extra, responses=responses, include_in_schema=path == "/v1/score")(score)
    return router


async def _scores(
    service: Service,
    body: ScoresBody,
    http: Request,
    info: ModelInfo,
    queries: Sequence[str],
    documents: Sequence[str],
    field: str,
) -> tuple[Floats, list[TokenizedPrompt]]:
    """Return the score of each document, [N], and the prompts that were read. queries: one, or as many."""
    found = await service.text_worker.run(
        count_chars((*queries, *documents)),
        lambda: compare(
            info.embedder,
            service.chat_renderer,
            queries,
            documents,
            instruction=body.instruction,
            truncate=body.truncate_prompt_tokens,
        ),
    )
    if found.reads_pairs and body.add_special_tokens is False:
        raise RequestError(
            "add_special_tokens is false; this model tells the texts of a pair apart by special tokens",
            param="add_special_tokens",
        )
    special = found.adds_special_tokens
    prompts = await tokenized(service, body, info, found.texts, field, add_special_tokens=special)
    vectors = await pool(service, body, http, prompts, found.pooling, field)
    return found.scores(vectors, activated=body.use_activation is not False), prompts


def _side(body: ScoreBody, name: str, other: str) -> list[str]:
    """Return the texts of one side, which has two names."""
    given = [each for each in (name, other) if getattr(body, each) is not None]
    if len(given) != 1:
        raise RequestError(f"exactly one of {name} and {other} must be given", param=name)
    value = getattr(body, given[0])
    if not isinstance(value, list):
        return [_text(value, given[0])]
    if not value:
        raise RequestError(f"{given[0]} is empty; it must have at least one text", param=given[0])
    return [_text(each, f"{given[0]}.{at}") for at, each in enumerate(value)]


def _text(value: Any, path: str) -> str:
    """Return a text that stands by itself or in an object, as Jina's documents do."""
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise RequestError(f"{path} is {shown(value)}; it must be a string, or an object with text", param=path)
    return text


def _json(content: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
