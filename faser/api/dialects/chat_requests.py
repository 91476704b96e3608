"""POST /v1/chat/completions: from the body of a chat to its handler. All dialects of chats go this way."""

import time
from collections.abc import Callable
from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from faser.api.answers.framing import AnswerFraming, Envelope, TokenFormatter
from faser.api.answers.handler import GenerationHandler
from faser.api.bodies.chat import ChatBody
from faser.api.bodies.fields import UNSUPPORTED_IN_CHATS
from faser.api.bodies.openapi import GENERATED, json_body
from faser.api.dialects.chat_answers import ChatFormatter
from faser.api.dialects.generation import (
    build_handler,
    check_shared_fields,
    read_stream_options,
    tokenization_rules,
)
from faser.api.requests.prompts import TokenizedPrompt, count_chars, tokenize_prompts
from faser.api.requests.sampling import check_alternatives, sampling_params
from faser.api.requests.service import ApiSettings, Service
from faser.api.requests.thinking import template_effort, template_kwargs, thinking_budget
from faser.api.requests.tool_use import ToolUse, read_tool_use
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import RequestError
from faser.optional import maybe, or_else
from faser.types.engine import ModelInfo
from faser.types.sampling import SamplingParams


def chat_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=json_body(ChatBody), responses=GENERATED)
    async def create_chat_completion(http: Request) -> Response:
        return await answer_chat(service, http, await service.read(http, ChatBody))

    return router


async def answer_chat(service: Service, http: Request, body: ChatBody) -> Response:
    handler = await chat_handler(service, http, body, arrival_s=time.monotonic())
    return await handler.respond(http.receive)


async def chat_handler(
    service: Service,
    http: Request,
    body: ChatBody,
    *,
    arrival_s: float,
    frame: Callable[[Envelope], AnswerFraming] | None = None,
    shortens: bool = False,
) -> GenerationHandler:
    """arrival_s, by time.monotonic(), is when the body was complete. frame, shortens: as of build_handler.

    Raises RequestError whose param is a field of ChatBody, and NotReadyError.
    """
    info = check_shared_fields(service, body, http, UNSUPPORTED_IN_CHATS)
    read_stream_options(body, force_usage=False)
    tokenizer = service.engine.tokenizer
    sampling = _sampling(body, service.settings, tokenizer)
    tool_use = read_tool_use(body, service.parsers, asks_structure=sampling.structured_output is not None)
    prompt = await chat_prompt(service, body, info, tool_use)
    sampling = tool_use.constrain(sampling, prompt.text or "", tokenizer)
    budget = thinking_budget(
        body,
        service.parsers.reasoning,
        prompt.text or "",
        service.chat_renderer.template_of(tools=bool(tool_use.tools)),
        tokenizer,
        vocab_size=info.vocab_size,
    )
    sampling = replace(sampling, thinking_budget=budget)
    formatter = ChatFormatter(
        token_formatter=TokenFormatter(tokenizer=tokenizer, as_ids=bool(body.return_tokens_as_token_ids)),
        parsing=tool_use.parsing(tokenizer),
        calls_by_name=tool_use.choice.by_name,
        return_token_ids=bool(body.return_token_ids),
        return_prompt_text=bool(body.return_prompt_text),
        prompt=prompt,
        echo=_echo(body),
        asks_prompt_logprobs=body.prompt_logprobs is not None,
    )
    return await build_handler(
        service,
        http,
        body,
        formatter,
        [prompt],
        sampling,
        arrival_s,
        frame,
        shortens=shortens,
        limit_field=_limit_field(body),
    )


def _sampling(body: ChatBody, settings: ApiSettings, tokenizer: Tokenizer) -> SamplingParams:
    """Raises RequestError. Without max_tokens the answer may fill the rest of the context."""
    asks_alternatives = body.top_logprobs or 0
    if asks_alternatives and not body.logprobs:
        raise RequestError(
            f"top_logprobs is {asks_alternatives}; it needs logprobs to be true", param="top_logprobs"
        )
    check_alternatives("top_logprobs", body.top_logprobs, settings)
    name = _limit_field(body)
    max_tokens = or_else(body.max_completion_tokens, body.max_tokens)
    if max_tokens is None:
        default = settings.generation_defaults.get("max_tokens")
        max_tokens = maybe(int, default)
    elif max_tokens < 1:
        raise RequestError(f"{name} is {max_tokens}; it must be at least 1", param=name)
    logprobs = asks_alternatives if body.logprobs else None
    return sampling_params(body, settings, tokenizer, max_tokens=max_tokens, logprobs=logprobs)


async def chat_prompt(
    service: Service, body: ChatBody, info: ModelInfo, tool_use: ToolUse | None = None
) -> TokenizedPrompt:
    """The messages as token ids. The chat template writes the special tokens.

    tool_use: of the body, if it has been read.
    """
    tools = (tool_use or read_tool_use(body, service.parsers)).described()
    renderer = service.chat_renderer
    template = renderer.template_of(tools=bool(tools))
    accepted = renderer.efforts_of(tools=bool(tools))
    effort = template_effort(body.reasoning_effort, template, accepted, service.parsers.reasoning)
    text = await service.text_worker.run(
        count_chars((body.messages, tools, body.chat_template_kwargs, body.documents, effort)),
        lambda: renderer.render(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template_kwargs=template_kwargs(body, template),
            template_fields={"reasoning_effort": effort, "documents": body.documents},
            tools=tools,
        ),
    )
    rules = tokenization_rules(body, info, field=ChatFormatter.prompt_field, add_special_tokens=False)
    (prompt,) = await tokenize_prompts([text], service.engine.tokenizer, rules, service.text_worker)
    tail = service.chat_renderer.tail(template_kwargs(body, template), tools=bool(tools))
    if tail is None or not text.endswith(tail):
        return prompt
    return replace(prompt, tail=len(service.engine.tokenizer.encode(tail, add_special_tokens=False)))


def _limit_field(body: ChatBody) -> str:
    return "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"


def _echo(body: ChatBody) -> str:
    """The text that the answer continues, if the body asks to have it repeated."""
    last = body.messages[-1]
    content = last.get("content") if body.echo and last.get("role") == "assistant" else ""
    return content if isinstance(content, str) else ""
