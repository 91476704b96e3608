"""POST /v1/chat/completions."""

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from faser.api.protocol.body import read_body
from faser.api.protocol.chat import ChatBody
from faser.api.protocol.fields import REFUSED_IN_CHAT
from faser.api.routes.openapi import json_body
from faser.api.serving.accept import build_job, check_shared, prompt_rules, read_streaming
from faser.api.serving.chat_formatter import ChatFormatter
from faser.api.serving.handler import respond
from faser.api.serving.logprobs import TokenNames
from faser.api.serving.prediction import read_prediction
from faser.api.serving.prompts import Prompt, in_background, read_prompts_tokens
from faser.api.serving.sampling_params import chat_sampling
from faser.api.serving.service import Service
from faser.types import ModelInfo


def chat_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=json_body(ChatBody))
    async def create_chat_completion(http: Request) -> Response:
        body = await read_body(http, ChatBody, max_bytes=service.settings.max_request_bytes)
        arrival_s = time.monotonic()
        info = check_shared(service, body, http, REFUSED_IN_CHAT)
        read_streaming(body, force_usage=False)
        sampling = chat_sampling(body, service.settings)
        prompt = await _prompt(service, body, info)
        shape = ChatFormatter(
            names=TokenNames(tokenizer=service.engine.tokenizer, as_ids=bool(body.return_tokens_as_token_ids)),
            return_token_ids=bool(body.return_token_ids),
            asks_prompt_logprobs=body.prompt_logprobs is not None,
        )
        predicted = await read_prediction(body.prediction, service.engine.tokenizer, limit=info.max_model_len)
        job = build_job(service, http, body, shape, [prompt], sampling, predicted, arrival_s)
        return await respond(service, job, http)

    return router


async def _prompt(service: Service, body: ChatBody, info: ModelInfo) -> Prompt:
    """The conversation as token ids; the template itself puts the special tokens in."""
    chars = sum(_size(message) for message in body.messages)
    text = await in_background(
        chars,
        lambda: service.conversation.render(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template_kwargs=body.chat_template_kwargs,
            named={"reasoning_effort": body.reasoning_effort, "documents": body.documents},
        ),
    )
    rules = prompt_rules(body, info, field=ChatFormatter.prompt_field, add_special_tokens=False)
    (prompt,) = await read_prompts_tokens([text], service.engine.tokenizer, rules)
    return prompt


def _size(message: dict[str, Any]) -> int:
    """Characters, roughly: content in parts counts as much."""
    content = message.get("content")
    return len(content) if isinstance(content, str) else len(str(content))
