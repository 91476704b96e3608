"""From a checked body to its GenerationHandler: the steps that all dialects share."""

import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fastapi import Request as HttpRequest
from starlette.datastructures import Headers
from starlette.types import Scope

from faser.api.answers.framing import AnswerFormatter, AnswerFraming, ChoicesFraming, Envelope, Streaming
from faser.api.answers.generation_record import describe
from faser.api.answers.handler import GenerationHandler
from faser.api.bodies.fields import AgentHints, GenerationBody, NvExt, UnsupportedField
from faser.api.middleware.keys import get_key_identity, tenant_of
from faser.api.middleware.outer import get_request_id, set_request_id
from faser.api.middleware.tracing import trace_of
from faser.api.requests.prompts import TokenizationRules, TokenizedPrompt, read_prediction
from faser.api.requests.service import ApiSettings, Service
from faser.api.requests.speculation import check_trace, speculation_params
from faser.errors import RequestError
from faser.optional import or_else, present
from faser.types.engine import ModelInfo
from faser.types.request import Request
from faser.types.sampling import SamplingParams

TIMEOUT_HEADER = "X-Request-Timeout"
LOAD_BEGAN = "faser.load_began_s"
_NO_NVEXT, _NO_HINTS = NvExt(), AgentHints(priority=None, osl=None)


def check_shared_fields(
    service: Service, body: GenerationBody, http: HttpRequest, unsupported: Mapping[str, UnsupportedField]
) -> ModelInfo:
    """Check the fields that concern neither the prompt nor sampling, and that the engine is ready.

    Raises RequestError, or NotReadyError if the engine accepts no requests now.
    """
    service.fields.check(body.model_extra, unsupported)
    if body.request_id is not None:
        set_request_id(http.scope, body.request_id, "request_id")
    service.model_name(body.model)
    info = service.ready_info()
    if info.embedder.is_encoder:
        raise RequestError(
            "this model is an encoder, which generates no text; it serves "
            + (
                "/v1/rerank and /v1/score"
                if info.embedder.judges_pairs
                else "/v1/embeddings, /v1/rerank, /v1/score"
            ),
            param="model",
        )
    return info


def tokenization_rules(
    body: GenerationBody, info: ModelInfo, *, field: str, add_special_tokens: bool
) -> TokenizationRules:
    """field: the body's field with the prompt. add_special_tokens: the route's default."""
    truncate = info.max_model_len if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens
    return TokenizationRules(
        limit=info.max_model_len,
        field=field,
        add_special_tokens=or_else(body.add_special_tokens, add_special_tokens),
        truncate=truncate,
        keeps_start=body.truncation_side == "right",
    )


def check_capacity(service: Service, num_prompts: int, sampling: SamplingParams) -> None:
    """Raises RequestError for more samples than the server can ever hold: a retry would not help."""
    num_samples, limit = num_prompts * sampling.n, service.engine.max_samples
    if num_prompts > 1 and num_samples > limit:
        raise RequestError(
            f"prompt has {num_prompts} prompts and n is {sampling.n}, together {num_samples} samples; this server "
            f"holds at most {limit}",
            param="prompt",
        )


def read_stream_options(body: GenerationBody, *, force_usage: bool) -> Streaming | None:
    """None: the body asks for one JSON answer. Raises RequestError for stream_options without stream."""
    options = body.stream_options
    if not body.stream:
        if options is not None:
            raise RequestError(
                "stream_options is set but stream is not true; leave it out or set stream", param="stream_options"
            )
        return None
    if options is None:
        return Streaming(ends_with_usage=force_usage, continuous_usage=force_usage)
    with_usage = bool(options.include_usage) or force_usage
    return Streaming(
        ends_with_usage=with_usage,
        continuous_usage=with_usage and (bool(options.continuous_usage_stats) or force_usage),
        obfuscates=bool(options.include_obfuscation),
    )


async def build_handler(
    service: Service,
    http: HttpRequest,
    body: GenerationBody,
    formatter: AnswerFormatter,
    prompts: Sequence[TokenizedPrompt],
    sampling: SamplingParams,
    arrival_s: float,
    frame: Callable[[Envelope], AnswerFraming] | None = None,
    *,
    shortens: bool = False,
    limit_field: str = "max_tokens",
) -> GenerationHandler:
    """arrival_s: time.monotonic() when the body was complete.

    frame: makes the frame of the answer; None: choices, as of chats and completions.
    shortens: max_tokens beyond the context is lowered to what is left, whatever the server's setting.
    limit_field: of the body, that set max_tokens.
    """
    settings, scope = service.settings, http.scope
    shortens = shortens or settings.shorten_max_tokens
    context = service.engine.info.max_model_len
    predicted = await read_prediction(
        body.prediction, service.engine.tokenizer, service.text_worker, limit=service.engine.info.max_model_len
    )
    request_id = get_request_id(scope)
    # Clients choose request ids and may repeat one; the engine needs unique ids.
    unique = uuid.uuid4().hex[:12]
    namespace = service.namespaces.name(get_key_identity(scope), body.cache_salt)
    adapter = service.adapter(body.model)
    streaming = read_stream_options(body, force_usage=settings.force_include_usage)
    speculation = speculation_params(
        body.speculative, http.headers, settings.speculation, service_tier=body.service_tier
    )
    priority, expected_tokens = read_hints(body)
    streams_choices = streaming is not None and frame is None
    check_trace(speculation, streams_choices=streams_choices, shares_cache=namespace is None)
    tenant = tenant_of(scope, unique)
    deadline_s = deadline_of(body.timeout, http.scope, settings.request_timeout_s, arrival_s)
    requests = tuple(
        Request(
            request_id=f"{request_id}-{unique}-{index}",
            prompt_token_ids=prompt.token_ids,
            sampling=fitted(sampling, len(prompt.token_ids), context, shortens=shortens, field=limit_field),
            priority=priority,
            arrival_s=arrival_s,
            adapter=adapter,
            cache_salt=namespace,
            shares_cache=namespace is None,
            speculation=speculation,
            predicted_token_ids=predicted or (),
            tenant=tenant,
            deadline_s=deadline_s,
            expected_tokens=expected_tokens,
            may_record=body.store is not False,
            prompt_tail=prompt.tail,
        )
        for index, prompt in enumerate(prompts)
    )
    envelope = Envelope(
        request_id=request_id,
        created_s=int(time.time()),
        model=service.model_name(body.model),
        system_fingerprint=_fingerprint(settings),
        sampling=sampling,
    )
    handler = GenerationHandler(
        service=service,
        scope=scope,
        requests=requests,
        prompts=tuple(prompts),
        formatter=formatter,
        envelope=envelope,
        framing=ChoicesFraming(envelope, formatter, streaming) if frame is None else frame(envelope),
        streams=streaming is not None,
        predicted=predicted,
    )
    if (trace := trace_of(scope)) is not None:
        trace.describe = lambda: describe(handler)
    return handler


def fitted(
    sampling: SamplingParams, num_prompt_tokens: int, context: int, *, shortens: bool, field: str
) -> SamplingParams:
    """Lower max_tokens to what the prompt leaves of the context, or raise RequestError about the field.

    context: in tokens. Prompts that leave nothing of it are for the engine to refuse.
    """
    left, asked = context - num_prompt_tokens, sampling.max_tokens
    if left < 1 or asked is None or asked <= left:
        return sampling
    if shortens:
        return replace(sampling, max_tokens=left)
    raise RequestError(
        f"This model's maximum context length is {context} tokens. The prompt has {num_prompt_tokens} tokens and "
        f"{field} is {asked}: together {num_prompt_tokens + asked}. Ask for at most {left}, or start the "
        "server with --shorten-max-tokens, which lowers it to what is left.",
        param=field,
    )


def _fingerprint(settings: ApiSettings) -> str:
    """With synthetic acceptance the answers are not the model's; the fingerprint says so."""
    return f"faser-{settings.version}{'-synthetic' if settings.speculation.synthetic else ''}"


def read_hints(body: GenerationBody) -> tuple[int, int | None]:
    """The priority, lower is sooner, and the tokens that the answer is expected to have.

    vLLM's `priority` wins over that of Dynamo's hints, whose sign is the other one.
    """
    hints = (body.nvext or _NO_NVEXT).agent_hints or _NO_HINTS
    return or_else(body.priority, -(hints.priority or 0)), hints.osl


def deadline_of(
    body_timeout: float | None, scope: Scope, server_timeout_s: float | None, arrival_s: float
) -> float | None:
    """When the request must be finished, by the clock of arrival_s; None: it has no deadline.

    scope: may have an earlier arrival, at LOAD_BEGAN: the request has waited for its model.
    Raises RequestError for a timeout that is not a number of seconds above 0.
    """
    timeouts = present((server_timeout_s, _checked("timeout", body_timeout), _header(Headers(scope=scope))))
    return scope.get(LOAD_BEGAN, arrival_s) + min(timeouts) if timeouts else None


def _header(headers: Headers) -> float | None:
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        return _checked(TIMEOUT_HEADER, float(text))
    except ValueError:
        raise _refusal(TIMEOUT_HEADER, text[:80]) from None


def _checked(name: str, timeout_s: float | None) -> float | None:
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise _refusal(name, timeout_s)
    return timeout_s


def _refusal(name: str, value: object) -> RequestError:
    return RequestError(f"{name} is {value}; it must be a number of seconds above 0", param=name)
