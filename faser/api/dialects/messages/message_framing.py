"""MessageFraming: the frame of a message: one document, or typed events from message_start to message_stop."""

from collections.abc import Mapping, Sequence
from typing import Any

from faser.api.dialects.conversion import Json
from faser.api.dialects.messages.content_blocks import ContentBlocks
from faser.api.dialects.typed_events import typed_event
from faser.api.protocol.errors import HttpError
from faser.api.protocol.messages_errors import messages_error_body
from faser.api.serving.answers.formatter import Choice, ChoiceState
from faser.api.serving.answers.framing import Envelope
from faser.api.serving.answers.speculation_report import SpeculationReport
from faser.api.serving.answers.usage import Usage
from faser.types import FinishReason

_STOP_REASONS = {FinishReason.LENGTH.value: "max_tokens", "tool_calls": "tool_use"}


class MessageFraming:
    """The frame of one message."""

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope
        self.answer_id = f"msg_{envelope.request_id}"
        self._content = ContentBlocks()
        self._started = False
        self._ended: Json = {"stop_reason": None, "stop_sequence": None}

    def document(
        self, choices: Sequence[Choice], states: Sequence[ChoiceState], usage: Usage, report: SpeculationReport
    ) -> dict[str, Any]:
        del states
        (choice,) = choices
        message = choice["message"]
        calls = [{**call, "index": at} for at, call in enumerate(message.get("tool_calls") or ())]
        self._content.take({**message, "tool_calls": calls})
        self._content.finish()
        return {
            **self._message(self._content.blocks, usage),
            **_ending(choice, called=bool(calls)),
            **report.as_json(),
        }

    def events(self, chunks: Sequence[Choice], usage: Usage) -> bytes:
        events: list[Json] = []
        for chunk in chunks:
            if not self._started:
                self._started = True
                events.append({"type": "message_start", "message": {**self._message([], usage), **self._ended}})
            events += self._content.take(chunk["delta"])
            if chunk["finish_reason"] is not None:
                self._ended = _ending(chunk, called=self._content.has_calls)
        return b"".join(map(typed_event, events))

    def failure(self, error: HttpError) -> bytes:
        return typed_event(messages_error_body(error.status, error.message, self._envelope.request_id))

    def end(self, usage: Usage, report: SpeculationReport) -> bytes:
        ended = {
            "type": "message_delta",
            "delta": self._ended,
            "usage": _usage(usage.as_json()),
            **report.as_json(),
        }
        return b"".join(map(typed_event, [*self._content.finish(), ended, {"type": "message_stop"}]))

    def _message(self, content: list[Json], usage: Usage) -> Json:
        return {
            "id": self.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self._envelope.model,
            "content": content,
            "usage": _usage(usage.as_json()),
        }


def _ending(choice: Choice, *, called: bool) -> Json:
    """Why the message ended. A stop sequence is named; a stop by a token id is an end of the turn.

    A chat that names the function to call ends with stop; a message with a call always ends with tool_use.
    """
    reason, stopped_by = choice["finish_reason"], choice.get("stop_reason")
    if reason == FinishReason.STOP and called:
        reason = "tool_calls"
    if reason == FinishReason.STOP and isinstance(stopped_by, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
    return {"stop_reason": _STOP_REASONS.get(reason, "end_turn"), "stop_sequence": None}


def _usage(counted: Mapping[str, Any]) -> Json:
    """Input tokens are those that were not cached, as with Anthropic; where that is withheld, all of them."""
    cached = (counted["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return {
        "input_tokens": counted["prompt_tokens"] - cached,
        "output_tokens": counted["completion_tokens"],
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }
