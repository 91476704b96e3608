"""From the body of a chat to its GenerationHandler. Every dialect whose requests are chats goes this way."""

from collections.abc import Callable

from fastapi import Request

from faser.api.protocol.chat import ChatBody
from faser.api.protocol.unsupported_fields import UNSUPPORTED_IN_CHATS
from faser.api.serving.answers.chat_formatter import ChatFormatter
from faser.api.serving.answers.framing import AnswerFraming, Envelope
from faser.api.serving.answers.logprobs import TokenFormatter
from faser.api.serving.answers.prediction import read_prediction
from faser.api.serving.handler import GenerationHandler
from faser.api.serving.request_builder import (
    build_handler,
    check_shared_fields,
    read_stream_options,
    tokenization_rules,
)
from faser.api.serving.requests.prompts import TokenizedPrompt, tokenize_prompts
from faser.api.serving.requests.sampling_params import chat_sampling
from faser.api.serving.requests.text_worker import count_chars
from faser.api.serving.requests.tool_use import ToolUse, read_tool_use
from faser.api.serving.service import Service
from faser.errors import RequestError
from faser.types import ModelInfo


async def chat_handler(
    service: Service,
    http: Request,
    body: ChatBody,
    *,
    arrival_s: float,
    frame: Callable[[Envelope], AnswerFraming] | None = None,
) -> GenerationHandler:
    """arrival_s, by time.monotonic(), is when the body was complete. frame: as of build_handler.

    Raises RequestError whose param is a field of ChatBody, and NotReadyError.
    """
    info = check_shared_fields(service, body, http, UNSUPPORTED_IN_CHATS)
    read_stream_options(body, force_usage=False)
    tokenizer = service.engine.tokenizer
    sampling = chat_sampling(body, service.settings, tokenizer)
    tool_use = read_tool_use(body, service.parsers, asks_structure=sampling.structured_output is not None)
    prompt = await chat_prompt(service, body, info, tool_use)
    sampling = tool_use.constrain(sampling, prompt.text or "", tokenizer)
    _check_room(body.max_completion_tokens, len(prompt.token_ids), info.max_model_len)
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
    predicted = await read_prediction(body.prediction, tokenizer, service.text_worker, limit=info.max_model_len)
    return build_handler(service, http, body, formatter, [prompt], sampling, predicted, arrival_s, frame)


def _echo(body: ChatBody) -> str:
    """The text that the answer continues, if the body asks to have it repeated."""
    last = body.messages[-1]
    content = last.get("content") if body.echo and last.get("role") == "assistant" else ""
    return content if isinstance(content, str) else ""


def _check_room(max_completion_tokens: int | None, num_prompt_tokens: int, limit: int) -> None:
    """The engine checks the same, but knows this field as max_tokens."""
    if max_completion_tokens is not None and limit > num_prompt_tokens > limit - max_completion_tokens:
        together = num_prompt_tokens + max_completion_tokens
        raise RequestError(
            f"This model's maximum context length is {limit} tokens. The prompt has {num_prompt_tokens} tokens "
            f"and max_completion_tokens is {max_completion_tokens}: together {together}.",
            param="max_completion_tokens",
        )


async def chat_prompt(
    service: Service, body: ChatBody, info: ModelInfo, tool_use: ToolUse | None = None
) -> TokenizedPrompt:
    """The messages as token ids. The chat template writes the special tokens.

    tool_use: of the body, if it has been read.
    """
    tools = (tool_use or read_tool_use(body, service.parsers)).described()
    text = await service.text_worker.run(
        count_chars((body.messages, tools, body.chat_template_kwargs, body.documents, body.reasoning_effort)),
        lambda: service.chat_renderer.render(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template_kwargs=body.chat_template_kwargs,
            template_fields={"reasoning_effort": body.reasoning_effort, "documents": body.documents},
            tools=tools,
        ),
    )
    rules = tokenization_rules(body, info, field=ChatFormatter.prompt_field, add_special_tokens=False)
    (prompt,) = await tokenize_prompts([text], service.engine.tokenizer, rules, service.text_worker)
    return prompt
