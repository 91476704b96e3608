"""ResponseFraming: the frame of a response: one document, or typed events that are numbered.

A stream ends with response.completed, response.incomplete or response.failed; there is no [DONE].
"""

import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from faser.api.dialects.conversion import Json
from faser.api.dialects.responses.body import ResponsesBody
from faser.api.dialects.responses.output_items import COMPLETED, IN_PROGRESS, INCOMPLETE, OutputItems
from faser.api.dialects.typed_events import typed_event
from faser.api.protocol.errors import HttpError
from faser.api.serving.answers.formatter import Choice, ChoiceState
from faser.api.serving.answers.framing import Envelope
from faser.api.serving.answers.speculation_report import SpeculationReport
from faser.api.serving.answers.usage import Usage
from faser.types import FinishReason, SamplingParams

_FAILED = "failed"


class ResponseFraming:
    """The frame of one response. body: the request, which the response repeats."""

    def __init__(self, envelope: Envelope, body: ResponsesBody) -> None:
        self._output = OutputItems(envelope.request_id)
        self._number = 0
        self._finish_reason: str | None = None
        self.answer_id = f"resp_{envelope.request_id}"
        self._echo = {
            "id": self.answer_id,
            "object": "response",
            "created_at": envelope.created_s,
            "model": envelope.model,
            **_repeated(body, envelope.sampling),
        }

    def document(
        self, choices: Sequence[Choice], states: Sequence[ChoiceState], usage: Usage, report: SpeculationReport
    ) -> dict[str, Any]:
        del states
        (choice,) = choices
        message = choice["message"]
        calls = [{**call, "index": at} for at, call in enumerate(message.get("tool_calls") or ())]
        self._output.take({**message, "tool_calls": calls}, _text_logprobs(message, _logprobs(choice)))
        return self._ended(choice["finish_reason"], usage, report)[1]

    def events(self, chunks: Sequence[Choice], usage: Usage) -> bytes:
        del usage
        events: list[Json] = []
        for chunk in chunks:
            if self._number == 0 and not events:
                begun = self._response(IN_PROGRESS)
                events += [
                    {"type": "response.created", "response": begun},
                    {"type": "response.in_progress", "response": begun},
                ]
            events += self._output.take(chunk["delta"], _logprobs(chunk))
            self._finish_reason = chunk["finish_reason"] or self._finish_reason
        return self._sent(events)

    def failure(self, error: HttpError) -> bytes:
        events = self._output.finish(INCOMPLETE)
        failed = self._response(_FAILED, error={"code": "server_error", "message": error.message})
        return self._sent([*events, {"type": "response.failed", "response": failed}])

    def end(self, usage: Usage, report: SpeculationReport) -> bytes:
        events, response = self._ended(self._finish_reason, usage, report)
        return self._sent([*events, {"type": f"response.{response['status']}", "response": response}])

    def _ended(
        self, finish_reason: str | None, usage: Usage, report: SpeculationReport
    ) -> tuple[list[Json], Json]:
        """(the events that end the output, the response). Only the length makes a response incomplete."""
        fields: Json = {"usage": _usage(usage.as_json()), **report.as_json()}
        match finish_reason:
            case FinishReason.LENGTH:
                status = INCOMPLETE
                fields["incomplete_details"] = {"reason": "max_output_tokens"}
            case FinishReason.ABORT | FinishReason.ERROR:
                status = _FAILED
                fields["error"] = {"code": "server_error", "message": "the engine ended the answer early"}
            case _:
                status = COMPLETED
                fields["completed_at"] = int(time.time())
        events = self._output.finish(COMPLETED if status == COMPLETED else INCOMPLETE)
        return events, self._response(status, **fields)

    def _response(self, status: str, **fields: Any) -> Json:
        nothing = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
        return {**self._echo, "status": status, **nothing, **fields, "output": list(self._output.items)}

    def _sent(self, events: Sequence[Json]) -> bytes:
        numbered = []
        for event in events:
            numbered.append(typed_event({**event, "sequence_number": self._number}))
            self._number += 1
        return b"".join(numbered)


def _logprobs(choice: Choice) -> list[Json]:
    found: list[Json] = (choice.get("logprobs") or {}).get("content") or []
    return found


def _text_logprobs(message: Mapping[str, Any], logprobs: list[Json]) -> list[Json]:
    """Those of the text, where there are reasoning and calls beside it. logprobs: of the whole answer."""
    reasoning, text = message.get("reasoning_content") or "", message.get("content") or ""
    if not (reasoning or message.get("tool_calls")):
        return logprobs
    ends = list(accumulate(len(each["bytes"]) for each in logprobs))
    answer = b"".join(bytes(each["bytes"]) for each in logprobs)
    begin = answer.find(text.encode(), answer.find(reasoning.encode()) + len(reasoning.encode()))
    if begin < 0:
        return []
    end = begin + len(text.encode())
    return [
        each for each, ends_at in zip(logprobs, ends, strict=True) if begin < ends_at < end + len(each["bytes"])
    ]


def _usage(counted: Mapping[str, Any]) -> Json:
    """Counted as for chats. Cached tokens are 0 where they are withheld; none are ever written to a cache."""
    details = counted["prompt_tokens_details"] or {}
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": details.get("cached_tokens") or 0, "cache_write_tokens": 0},
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": (counted["completion_tokens_details"] or {}).get("reasoning_tokens") or 0
        },
        "total_tokens": counted["total_tokens"],
    }


def _repeated(body: ResponsesBody, sampling: SamplingParams) -> Json:
    """The fields of a response that repeat the request, with the values in effect."""
    text, reasoning = body.text, body.reasoning
    text_format = (
        {"type": "text"}
        if text is None or text.format is None
        else text.format.model_dump(by_alias=True, exclude_none=True)
    )
    if text_format["type"] == "json_schema":
        text_format.setdefault("name", "schema")
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_logprobs": body.top_logprobs or 0,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "text": {"format": text_format, "verbosity": None if text is None else text.verbosity},
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "tools": [_tool(tool) for tool in body.tools or ()],
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "truncation": "disabled",
        "store": False,
        "background": False,
        "previous_response_id": None,
        "service_tier": "default",
        "metadata": body.metadata or {},
        "prompt_cache_key": body.prompt_cache_key,
        "safety_identifier": body.safety_identifier,
        "user": body.user,
    }


def _tool(tool: Json) -> Json:
    """A function with every key that a response must have."""
    return {"description": None, "parameters": None, "strict": None, **tool}
