"""Attributes of a span about one generation, read from its handler when the span ends.

Nothing is counted here while tokens arrive. Names are those of OpenTelemetry's semantic conventions for generative
AI (status: development), vLLM's for latencies and the request's id, and faser.* for speculation. No text of a
prompt, an answer or a stop string is in it.
"""

import math
from collections.abc import Sequence

from faser.api.answers.handler import GenerationHandler
from faser.api.answers.usage import Usage
from faser.api.middleware.tracing import GenerationAttributes
from faser.engine.client.output_stream import Timing
from faser.optional import given, present
from faser.tracing import AttributeValue, Phase
from faser.types.sampling import SamplingParams, StructureKind

_JSON_KINDS = (StructureKind.JSON, StructureKind.JSON_OBJECT)


def describe(handler: GenerationHandler) -> GenerationAttributes:
    """The generation as far as it has come."""
    first, model = handler.requests[0], handler.envelope.model
    operation = "text_completion" if handler.formatter.object_name == "text_completion" else "chat"
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": operation,
        "gen_ai.request.model": model,
        "gen_ai.request.stream": handler.streams,
        **_of_sampling(first.sampling),
        "gen_ai.response.id": handler.framing.answer_id,
        "gen_ai.response.model": model,
    }
    phases: Sequence[Phase] = ()
    if not handler.readers:  # the engine has not accepted the requests
        attributes["gen_ai.usage.input_tokens"] = handler.usage.num_prompt_tokens
    else:
        times = GenerationTimes([reader.timing for reader in handler.readers])
        reasons = present(state.finish_reason for state in handler.states)
        attributes |= {"gen_ai.response.finish_reasons": reasons} if reasons else {}
        attributes |= _of_usage(handler.usage) | times.attributes() | _of_speculation(handler)
        phases = times.phases()
    return GenerationAttributes(operation=operation, model=model, attributes=attributes, phases=phases)


def _of_sampling(sampling: SamplingParams) -> dict[str, AttributeValue]:
    """The values in effect, defaults of the server included; those that are off are left out."""
    structure = sampling.structured_output
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.output.type": "json" if structure is not None and structure.kind in _JSON_KINDS else "text",
    }
    attributes |= given({"gen_ai.request.max_tokens": sampling.max_tokens, "gen_ai.request.seed": sampling.seed})
    edits: dict[str, tuple[AttributeValue, AttributeValue]] = {
        "gen_ai.request.top_k": (sampling.top_k, 0),
        "gen_ai.request.frequency_penalty": (sampling.frequency_penalty, 0.0),
        "gen_ai.request.presence_penalty": (sampling.presence_penalty, 0.0),
        "gen_ai.request.choice.count": (sampling.n, 1),
    }
    attributes |= {name: value for name, (value, off) in edits.items() if value != off}
    return attributes


def _of_usage(usage: Usage) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "gen_ai.usage.input_tokens": usage.num_prompt_tokens,
        "gen_ai.usage.output_tokens": usage.num_completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.num_cached_tokens,
    }
    if usage.num_reasoning_tokens:
        attributes["gen_ai.usage.reasoning.output_tokens"] = usage.num_reasoning_tokens
    return attributes


def _of_speculation(handler: GenerationHandler) -> dict[str, AttributeValue]:
    """Also where the client gets no counts: a trace is the operator's."""
    counts = handler.usage.speculation.counts()
    if counts is None:
        return {}
    return {
        "faser.spec.policy": counts.policy,
        "faser.spec.method": handler.service.settings.speculation.method,
        "faser.spec.class": handler.requests[0].speculation.class_name,
        "faser.spec.steps": counts.steps,
        "faser.spec.drafted_tokens": counts.drafted,
        "faser.spec.pruned_tokens": counts.pruned,
        "faser.spec.verified_tokens": counts.verified,
        "faser.spec.accepted_tokens": counts.accepted,
        "faser.spec.wasted_tokens": counts.wasted,
        "faser.spec.gamma_mean": counts.gamma_mean,
        "faser.spec.acceptance_rate": counts.accepted / counts.verified if counts.verified else 0.0,
    }


class GenerationTimes:
    """Moments of all prompts of a request together: the first one scheduled, the first token, the last token.

    What has not happened is NaN, and so is each time from or to it.
    """

    def __init__(self, timings: Sequence[Timing]) -> None:
        self._arrival_s = min(each.arrival_s for each in timings)
        self._scheduled_s = min(present(each.scheduled_s for each in timings), default=math.nan)
        self._first_s = min(present(each.first_token_s for each in timings), default=math.nan)
        self._last_s = max((moment for each in timings for moment in each.last_token_s.values()), default=math.nan)
        self._num_preemptions = sum(sum(each.num_preemptions.values()) for each in timings)

    def attributes(self) -> dict[str, AttributeValue]:
        """In seconds. What had not happened by the end of the request has none."""
        arrival_s, scheduled_s, first_s, last_s = self._arrival_s, self._scheduled_s, self._first_s, self._last_s
        latencies = {
            "gen_ai.latency.time_in_queue": max(scheduled_s - arrival_s, 0.0),
            "gen_ai.latency.time_to_first_token": first_s - arrival_s,
            "gen_ai.latency.time_in_model_prefill": first_s - scheduled_s,
            "gen_ai.latency.time_in_model_decode": last_s - first_s,
            "gen_ai.latency.time_in_model_inference": last_s - scheduled_s,
            "gen_ai.latency.e2e": last_s - arrival_s,
        }
        happened = {name: seconds for name, seconds in latencies.items() if not math.isnan(seconds)}
        return {"faser.preemptions": self._num_preemptions, **happened}

    def phases(self) -> list[Phase]:
        moments = (
            ("queue", self._arrival_s, self._scheduled_s),
            ("prefill", self._scheduled_s, self._first_s),
            ("decode", self._first_s, self._last_s),
        )
        return [
            Phase(name=name, began_s=began_s, ended_s=max(began_s, ended_s))
            for name, began_s, ended_s in moments
            if not math.isnan(ended_s - began_s)
        ]
