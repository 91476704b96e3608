"""From a checked body to a Job: what chat and text completions have in common."""

import time
import uuid
from collections.abc import Mapping, Sequence

from fastapi import Request as HttpRequest

from faser.api.middleware.request_id import get_request_id, set_request_id
from faser.api.protocol.common import GenerationBody
from faser.api.protocol.fields import Refusal
from faser.api.serving.formatter import AnswerFormatter
from faser.api.serving.handler import GenerationHandler, Streaming
from faser.api.serving.prompts import Prompt, PromptRules
from faser.api.serving.service import Service
from faser.api.serving.settings import ApiSettings
from faser.api.serving.speculation import speculation_params
from faser.errors import RequestError
from faser.types import ModelInfo, Request, SamplingParams


def check_shared(
    service: Service, body: GenerationBody, http: HttpRequest, refused: Mapping[str, Refusal]
) -> ModelInfo:
    """Everything about a body that needs neither its prompt nor its sampling.

    Raises RequestError, or NotReadyError if the engine takes no requests now.
    """
    service.fields.check(body.model_extra, refused)
    if body.request_id is not None:
        set_request_id(http.scope, body.request_id, "request_id")
    service.model_name(body.model)
    if body.priority and not service.settings.priority_scheduling:
        raise RequestError(
            f"priority is {body.priority}; it must be 0 unless the server runs with --scheduling-policy priority",
            param="priority",
        )
    return service.ready_info()


def prompt_rules(body: GenerationBody, info: ModelInfo, *, field: str, add_special_tokens: bool) -> PromptRules:
    """field: where the prompt comes from. add_special_tokens: where the body does not say."""
    truncate = info.max_model_len if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens
    given = body.add_special_tokens
    return PromptRules(
        limit=info.max_model_len,
        field=field,
        add_special_tokens=add_special_tokens if given is None else given,
        truncate=truncate,
    )


def check_room(service: Service, num_prompts: int, sampling: SamplingParams) -> None:
    """Raises RequestError for more samples than the server ever holds: trying again would not help."""
    wanted, room = num_prompts * sampling.n, service.engine.max_samples
    if num_prompts > 1 and wanted > room:
        raise RequestError(
            f"prompt has {num_prompts} prompts and n is {sampling.n}, together {wanted} samples; this server "
            f"holds at most {room}",
            param="prompt",
        )


def read_streaming(body: GenerationBody, *, force_usage: bool) -> Streaming | None:
    """None: one JSON answer. Raises RequestError for options without a stream."""
    options = body.stream_options
    if not body.stream:
        if options is not None:
            raise RequestError(
                "stream_options is set but stream is not true; leave it out or set stream", param="stream_options"
            )
        return None
    if options is None:
        return Streaming(ends_with_usage=force_usage)
    if options.include_obfuscation:
        raise RequestError(
            "`stream_options.include_obfuscation` is not supported: chunks are sent without padding",
            param="stream_options.include_obfuscation",
        )
    return Streaming(
        ends_with_usage=bool(options.include_usage) or force_usage,
        continuous_usage=bool(options.continuous_usage_stats),
    )


def build_job(
    service: Service,
    http: HttpRequest,
    body: GenerationBody,
    shape: AnswerFormatter,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    predicted: tuple[int, ...] | None,
    arrival_s: float,
) -> GenerationHandler:
    """predicted: of the body's prediction. arrival_s: when the body was there, on time.monotonic()."""
    request_id = get_request_id(http.scope)
    # Callers choose their ids and may choose the same twice; the engine needs unique ones.
    unique = uuid.uuid4().hex[:12]
    settings = service.settings
    speculation = speculation_params(body.speculative, http.headers, settings.speculation)
    requests = tuple(
        Request(
            request_id=f"{request_id}-{unique}-{at}",
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            priority=body.priority or 0,
            arrival_s=arrival_s,
            cache_salt=body.cache_salt,
            speculation=speculation,
            predicted_token_ids=predicted or (),
        )
        for at, prompt in enumerate(prompts)
    )
    return GenerationHandler(
        request_id=request_id,
        requests=requests,
        prompts=tuple(prompts),
        shape=shape,
        envelope={
            "id": f"{shape.id_prefix}{request_id}",
            "created": int(time.time()),
            "model": service.model_name(body.model),
            "system_fingerprint": _fingerprint(settings),
        },
        streaming=read_streaming(body, force_usage=settings.force_include_usage),
        predicted=predicted,
    )


def _fingerprint(settings: ApiSettings) -> str:
    """Answers made with synthetic acceptance are not the model's, and say so."""
    return f"faser-{settings.version}{'-synthetic' if settings.speculation.synthetic else ''}"
