"""The answer to /v1/messages: one document, or typed events from message_start to message_stop.

A whole answer is made by the same steps as a stream: its blocks are those at the stream's end.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from faser.api.answers.framing import Choice, ChoiceState, Envelope
from faser.api.answers.usage import Usage
from faser.api.bodies.errors import HttpError, messages_error_body
from faser.api.dialects.conversion import Json, typed_event
from faser.types.answer import FinishReason

_STOP_REASONS = {FinishReason.LENGTH.value: "max_tokens", "tool_calls": "tool_use"}


class MessageFraming:
    """The frame of one message."""

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope
        self.answer_id = f"msg_{envelope.request_id}"
        self._content = ContentBlocks()
        self._started = False
        self._ended: Json = {"stop_reason": None, "stop_sequence": None}

    def document(self, choices: Sequence[Choice], states: Sequence[ChoiceState], usage: Usage) -> dict[str, Any]:
        del states
        (choice,) = choices
        message = choice["message"]
        calls = [{**call, "index": at} for at, call in enumerate(message.get("tool_calls") or ())]
        self._content.take({**message, "tool_calls": calls})
        self._content.finish()
        return {
            **self._message(self._content.blocks, usage),
            **_ending(choice, called=bool(calls)),
            **usage.metrics(),
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

    def end(self, usage: Usage) -> bytes:
        ended = {
            "type": "message_delta",
            "delta": self._ended,
            "usage": _usage(usage.as_json()),
            **usage.metrics(),
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
    """Return why the message ended. A stop sequence is named; a stop by a token id is an end of the turn.

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


class ContentBlocks:
    """The blocks of one message. All but the last one are complete."""

    def __init__(self) -> None:
        self._blocks: list[Json] = []
        self._open = False
        self._call_index: int | None = None  # of the call in progress, among the calls of the chat
        self._arguments = ""  # of the call in progress, as JSON

    def take(self, delta: Mapping[str, Any]) -> list[Json]:
        """The events of a chat's delta."""
        events: list[Json] = []
        if thinking := delta.get("reasoning_content") or delta.get("reasoning"):
            events += self._begin_if_new({"type": "thinking", "thinking": "", "signature": ""})
            self._blocks[-1]["thinking"] += thinking
            events.append(self._delta({"type": "thinking_delta", "thinking": thinking}))
        if text := delta.get("content"):
            events += self._begin_if_new({"type": "text", "text": ""})
            self._blocks[-1]["text"] += text
            events.append(self._delta({"type": "text_delta", "text": text}))
        for call in delta.get("tool_calls") or ():
            events += self._take_call(call)
        return events

    def finish(self) -> list[Json]:
        """The events that end the content."""
        return self._end()

    @property
    def has_calls(self) -> bool:
        return any(block["type"] == "tool_use" for block in self._blocks)

    @property
    def blocks(self) -> list[Json]:
        """The content, once it is finished."""
        return self._blocks

    def _take_call(self, call: Mapping[str, Any]) -> list[Json]:
        function = call.get("function") or {}
        events = []
        if call["index"] != self._call_index:
            name = function.get("name") or ""
            events += self._begin({"type": "tool_use", "id": call.get("id") or "", "name": name, "input": {}})
            self._call_index = call["index"]
        if arguments := function.get("arguments"):
            self._arguments += arguments
            events.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
        return events

    def _begin_if_new(self, block: Json) -> list[Json]:
        """Begin a block unless one of this type is in progress."""
        if self._open and self._blocks[-1]["type"] == block["type"]:
            return []
        return self._begin(block)

    def _begin(self, block: Json) -> list[Json]:
        events = self._end()
        self._blocks.append(block)
        self._open = True
        begun = {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}
        return [*events, begun]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _end(self) -> list[Json]:
        """The event that ends the block in progress, if there is one."""
        if not self._open:
            return []
        if self._blocks[-1]["type"] == "tool_use":
            self._blocks[-1]["input"] = _read_arguments(self._arguments)
        self._open, self._call_index, self._arguments = False, None, ""
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]


def _read_arguments(arguments: str) -> Json:
    """The input of a call. Arguments that the length cut off are kept as the text that there is."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}
