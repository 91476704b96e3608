"""POST /v1/embeddings: OpenAI's body, with what vLLM adds to it, and the vectors of its inputs."""

import time
from base64 import b64encode
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from faser.api.bodies.fields import LIST, Integer
from faser.api.bodies.openapi import BODY_ERRORS, answers, json_body
from faser.api.dialects.completions_requests import read_prompts
from faser.api.dialects.vectors import PoolingBody, check_body, pool, tokenized, usage
from faser.api.middleware.outer import get_request_id
from faser.api.requests.embedding import Floats, unit, vector_size
from faser.api.requests.prompts import count_chars
from faser.api.requests.service import Service
from faser.errors import RequestError
from faser.types.pooling import Embedder, Pooling


class EmbeddingBody(PoolingBody):
    """The input has the four forms of a prompt; messages are rendered by the chat template instead.

    dimensions: numbers of each vector; fewer than the model's for those trained for it. prompt_name: of a text
    that the checkpoint puts before inputs of a kind, such as query.
    """

    input: Any = None
    messages: list[dict[str, Any]] | None = LIST
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Integer | None = None
    prompt_name: str | None = None


def embeddings_router(service: Service) -> APIRouter:
    router = APIRouter()
    responses = answers(*BODY_ERRORS, 504)

    @router.post("/v1/embeddings", openapi_extra=json_body(EmbeddingBody), responses=responses)
    async def create_embeddings(http: Request) -> Response:
        body = await service.read(http, EmbeddingBody)
        info = check_body(service, body, http)
        size = vector_size(info.embedder, info.hidden_size, body.dimensions)
        num_chars = count_chars(body.messages or ())
        sources, field = await service.text_worker.run(num_chars, lambda: _sources(service, body, info.embedder))
        special = body.messages is None
        prompts = await tokenized(service, body, info, sources, field, add_special_tokens=special)
        pooling = Pooling(kind=info.embedder.kind)
        vectors = (await pool(service, body, http, prompts, pooling, field))[:, :size]
        if info.embedder.normalises:
            vectors = unit(vectors)

        def answer() -> bytes:
            as_text = body.encoding_format == "base64"
            data = [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": _encoded(vector) if as_text else vector.tolist(),
                }
                for index, vector in enumerate(vectors)
            ]
            fields: dict[str, Any] = {
                "id": f"embd-{get_request_id(http.scope)}",
                "object": "list",
                "created": int(time.time()),
                "model": service.model_name(body.model),
                "data": data,
                "usage": usage(prompts),
            }
            return msgspec.json.encode(fields)

        return Response(await service.text_worker.run(vectors.size, answer), media_type="application/json")

    return router


def _sources(service: Service, body: EmbeddingBody, embedder: Embedder) -> tuple[list[str | list[int]], str]:
    """Return the texts or token ids, and the field that they come from."""
    if (body.input is None) == (body.messages is None):
        raise RequestError("exactly one of input and messages must be given", param="input")
    if body.messages is not None:
        rendered = service.chat_renderer.render(
            body.messages,
            add_generation_prompt=False,
            continue_final_message=None,
            template_kwargs=None,
            template_fields={},
        )
        return [rendered], "messages"
    sources = read_prompts(body.input, "input")
    if body.prompt_name is None:
        return sources, "input"
    if (prefix := embedder.prompts.get(body.prompt_name)) is None:
        known = ", ".join(embedder.prompts) or "none"
        raise RequestError(
            f"prompt_name is {body.prompt_name[:100]!r}; this model's prompts are: {known}", param="prompt_name"
        )
    if any(isinstance(each, list) for each in sources):
        raise RequestError("prompt_name goes before texts; the input is token ids", param="prompt_name")
    return [f"{prefix}{each}" for each in sources], "input"


def _encoded(vector: Floats) -> str:
    """Return a vector as OpenAI's base64: of float32, little endian."""
    return b64encode(vector.astype("<f4").tobytes()).decode()
