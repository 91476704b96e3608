"""From a checked body to its GenerationHandler: the steps that chats and completions share."""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence

from fastapi import Request as HttpRequest

from faser.api.middleware.auth import get_key_index, tenant_of
from faser.api.middleware.key_limits import use_tokens
from faser.api.middleware.request_id import get_request_id, set_request_id
from faser.api.protocol.common import GenerationBody
from faser.api.protocol.unsupported_fields import UnsupportedField
from faser.api.serving.answers.choices_framing import ChoicesFraming, Streaming
from faser.api.serving.answers.formatter import AnswerFormatter
from faser.api.serving.answers.framing import AnswerFraming, Envelope
from faser.api.serving.generation_record import GenerationRecord
from faser.api.serving.handler import GenerationHandler
from faser.api.serving.requests.deadline import deadline_of
from faser.api.serving.requests.prompts import TokenizationRules, TokenizedPrompt
from faser.api.serving.requests.settings import ApiSettings
from faser.api.serving.requests.speculation_params import check_trace, speculation_params
from faser.api.serving.service import Service
from faser.api.tracing.request_trace import trace_of
from faser.errors import RequestError
from faser.types import ModelInfo, Request, SamplingParams


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
    return service.ready_info()


def tokenization_rules(
    body: GenerationBody, info: ModelInfo, *, field: str, add_special_tokens: bool
) -> TokenizationRules:
    """field: the body's field with the prompt. add_special_tokens: the route's default."""
    truncate = info.max_model_len if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens
    given = body.add_special_tokens
    return TokenizationRules(
        limit=info.max_model_len,
        field=field,
        add_special_tokens=add_special_tokens if given is None else given,
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


def build_handler(
    service: Service,
    http: HttpRequest,
    body: GenerationBody,
    formatter: AnswerFormatter,
    prompts: Sequence[TokenizedPrompt],
    sampling: SamplingParams,
    predicted: tuple[int, ...] | None,
    arrival_s: float,
    frame: Callable[[Envelope], AnswerFraming] | None = None,
) -> GenerationHandler:
    """predicted: token ids of the body's prediction. arrival_s: time.monotonic() when the body was complete.

    frame: makes the frame of the answer; None: choices, as of chats and completions.
    """
    request_id = get_request_id(http.scope)
    # Clients choose request ids and may repeat one; the engine needs unique ids.
    unique = uuid.uuid4().hex[:12]
    settings = service.settings
    namespace = service.namespaces.name(get_key_index(http.scope), body.cache_salt)
    streaming = read_stream_options(body, force_usage=settings.force_include_usage)
    speculation = speculation_params(body.speculative, http.headers, settings.speculation)
    streams_choices = streaming is not None and frame is None
    check_trace(speculation, streams_choices=streams_choices, shares_cache=namespace is None)
    tenant = tenant_of(http.scope, unique)
    deadline_s = deadline_of(body.timeout, http.headers, settings.request_timeout_s, arrival_s)
    requests = tuple(
        Request(
            request_id=f"{request_id}-{unique}-{index}",
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            priority=body.priority or 0,
            arrival_s=arrival_s,
            cache_salt=namespace,
            shares_cache=namespace is None,
            speculation=speculation,
            predicted_token_ids=predicted or (),
            tenant=tenant,
            deadline_s=deadline_s,
            may_record=body.store is not False,
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
    framing = ChoicesFraming(envelope, formatter, streaming) if frame is None else frame(envelope)
    record = GenerationRecord(
        operation="text_completion" if formatter.object_name == "text_completion" else "chat",
        model=envelope.model,
        answer_id=framing.answer_id,
        requests=requests,
        streams=streaming is not None,
        method=settings.speculation.method,
    )
    trace = trace_of(http.scope)
    if trace is not None:
        trace.describe = record.describe
    return GenerationHandler(
        service=service,
        request_id=request_id,
        requests=requests,
        prompts=tuple(prompts),
        formatter=formatter,
        framing=framing,
        streams=streaming is not None,
        predicted=predicted,
        use_tokens=lambda num_tokens: use_tokens(http.scope, num_tokens),
        record=record,
        trace=trace,
    )


def _fingerprint(settings: ApiSettings) -> str:
    """With synthetic acceptance the answers are not the model's; the fingerprint says so."""
    return f"faser-{settings.version}{'-synthetic' if settings.speculation.synthetic else ''}"
