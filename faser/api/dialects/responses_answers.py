"""The answer to /v1/responses: one document, or typed events that are numbered.

A whole answer is made by the same steps as a stream: its items are those at the stream's end. A stream ends with
response.completed, response.incomplete or response.failed; there is no [DONE].
"""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from faser.api.answers.framing import Choice, ChoiceState, Envelope
from faser.api.answers.usage import Usage
from faser.api.bodies.errors import HttpError
from faser.api.dialects.conversion import Json, typed_event
from faser.api.dialects.responses_calls import GROWING, CallItem
from faser.api.dialects.responses_tools import ClientTool
from faser.types.answer import FinishReason

IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "local_shell_call": "lsh",
    "shell_call": "sh",
    "apply_patch_call": "apc",
}
_FAILED = "failed"


class ResponseFraming:
    """The frame of one response.

    repeated: the fields that it repeats from the request. tools: see OutputItems. response_id: None: made of the
    request's. keep: takes the response once it has ended; not one that failed within a stream.
    """

    def __init__(
        self,
        envelope: Envelope,
        repeated: Json,
        tools: Mapping[str, ClientTool],
        *,
        response_id: str | None = None,
        keep: Callable[[Json], None] | None = None,
    ) -> None:
        self._output = OutputItems(envelope.request_id, tools)
        self._number = 0
        self._finish_reason: str | None = None
        self._keep = keep
        self.answer_id = response_id or f"resp_{envelope.request_id}"
        self._echo = {
            "id": self.answer_id,
            "object": "response",
            "created_at": envelope.created_s,
            "model": envelope.model,
            **repeated,
        }

    def document(self, choices: Sequence[Choice], states: Sequence[ChoiceState], usage: Usage) -> dict[str, Any]:
        del states
        (choice,) = choices
        message = choice["message"]
        calls = [{**call, "index": at} for at, call in enumerate(message.get("tool_calls") or ())]
        self._output.take({**message, "tool_calls": calls}, _text_logprobs(message, _logprobs(choice)))
        return self._ended(choice["finish_reason"], usage)[1]

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

    def end(self, usage: Usage) -> bytes:
        events, response = self._ended(self._finish_reason, usage)
        return self._sent([*events, {"type": f"response.{response['status']}", "response": response}])

    def _ended(self, finish_reason: str | None, usage: Usage) -> tuple[list[Json], Json]:
        """(the events that end the output, the response). Only the length makes a response incomplete."""
        fields: Json = {"usage": _usage(usage.as_json()), **usage.metrics()}
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
        response = self._response(status, **fields)
        if self._keep is not None:
            self._keep(response)
        return events, response

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
    """Those of the text, where there are reasoning and calls next to it. logprobs: of the whole answer."""
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


class OutputItems:
    """The items of one response. items: those begun so far; the last one may be in progress.

    tools: of the request, by the names of their functions. Events lack a sequence number; the framing adds it.
    """

    def __init__(self, request_id: str, tools: Mapping[str, ClientTool]) -> None:
        self._request_id = request_id
        self._tools = tools
        self.items: list[Json] = []
        self._call: CallItem | None = None  # in progress
        self._call_index: int | None = None  # its index among the calls of the chat
        self._held: list[Json] = []  # log probabilities of tokens whose text has not been seen yet

    def take(self, delta: Mapping[str, Any], logprobs: Sequence[Json]) -> list[Json]:
        """The events of a chat's delta. logprobs: of its tokens; only those of text are kept."""
        events: list[Json] = []
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if reasoning:
            self._held = []
            events += self._begin_if_new("reasoning")
            events.append(self._grow("response.reasoning_text.delta", reasoning))
        text = delta.get("content")
        if text is not None:
            self._held += logprobs
        if text:
            events += self._begin_if_new("message")
            events.append(self._grow_text(text))
        for call in delta.get("tool_calls") or ():
            events += self._take_call(call)
        return events

    def finish(self, status: str) -> list[Json]:
        """The events that end the output. status: of the last item; a response has one item at least."""
        held = self._held  # of tokens at the end that have no text
        events = [] if self.items or self._call is not None else self._begin("message")
        if held and self._is_growing("message"):
            self._held = held
            events.append(self._grow_text(""))
        return events + self._end(status)

    def _take_call(self, call: Mapping[str, Any]) -> list[Json]:
        function = call.get("function") or {}
        events = []
        if self._call is None or call["index"] != self._call_index:
            self._held = []
            events += self._end(COMPLETED)
            self._call = CallItem(self._tools, function.get("name") or "", call.get("id") or "")
            self._call_index = call["index"]
            if (begun := self._call.begun()) is not None:
                events += self._begin(begun[0], **begun[1])
        text = self._call.take(function.get("arguments") or "")
        return [*events, self._grow_call(text)] if text else events

    def _grow_call(self, text: str) -> Json:
        item = self.items[-1]
        key, event = GROWING[item["type"]]
        item[key] += text
        return self._event(f"{event}.delta", delta=text)

    def _begin_if_new(self, kind: str) -> list[Json]:
        """Begin an item unless one of this kind is in progress."""
        return [] if self._is_growing(kind) else [*self._end(COMPLETED), *self._begin(kind)]

    def _is_growing(self, kind: str) -> bool:
        return bool(self.items) and self.items[-1]["type"] == kind and self.items[-1]["status"] == IN_PROGRESS

    def _begin(self, kind: str, **fields: Any) -> list[Json]:
        item: Json = {
            "id": f"{_PREFIXES[kind]}_{self._request_id}_{len(self.items)}",
            "type": kind,
            "status": IN_PROGRESS,
            **fields,
        }
        match kind:
            case "message":
                item |= {"role": "assistant", "content": []}
                part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            case "reasoning":
                item |= {"summary": [], "content": []}
                part = {"type": "reasoning_text", "text": ""}
        events = [self._item_event("response.output_item.added", item, len(self.items))]
        self.items.append(item)
        if "content" in item:
            item["content"].append(part)
            events.append(self._event("response.content_part.added", content_index=0, part=dict(part)))
        return events

    def _grow_text(self, text: str) -> Json:
        """The event of a text, with the log probabilities that have been held."""
        logprobs, self._held = self._held, []
        self.items[-1]["content"][0]["logprobs"] += logprobs
        return {**self._grow("response.output_text.delta", text), "logprobs": logprobs}

    def _grow(self, kind: str, text: str) -> Json:
        self.items[-1]["content"][0]["text"] += text
        return self._event(kind, content_index=0, delta=text)

    def _end(self, status: str) -> list[Json]:
        """The events that end the item in progress, if there is one."""
        events: list[Json] = []
        if self._call is not None:
            if (whole := self._call.whole()) is not None:
                kind, fields, text = whole
                events += self._begin(kind, **fields)
                events += [self._grow_call(text)] if text else []
                status = COMPLETED if kind not in GROWING else status
            self._call = None
        if not self.items or self.items[-1]["status"] != IN_PROGRESS:
            return events
        return events + self._end_item(status)

    def _end_item(self, status: str) -> list[Json]:
        item, at = self.items[-1], len(self.items) - 1
        item["status"] = status
        done = self._item_event("response.output_item.done", item, at)
        if item["type"] in GROWING:
            key, event = GROWING[item["type"]]
            named = {"name": item["name"]} if key == "arguments" else {}
            return [self._event(f"{event}.done", **named, **{key: item[key]}), done]
        if "content" not in item:
            return [done]
        (part,) = item["content"]
        if item["type"] == "message":
            ended = self._event(
                "response.output_text.done", content_index=0, text=part["text"], logprobs=part["logprobs"]
            )
        else:
            ended = self._event("response.reasoning_text.done", content_index=0, text=part["text"])
        return [ended, self._event("response.content_part.done", content_index=0, part=part), done]

    def _event(self, kind: str, **fields: Any) -> Json:
        """An event of the last item."""
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}

    def _item_event(self, kind: str, item: Json, at: int) -> Json:
        """An event with an item as it is now: its content is filled later."""
        snapshot = {**item, "content": list(item["content"])} if "content" in item else dict(item)
        return {"type": kind, "output_index": at, "item": snapshot}
