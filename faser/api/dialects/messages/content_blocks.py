"""The content of a message: blocks, and the events with which they grow.

A whole answer is made by the same steps as a stream: its blocks are those at the stream's end.
"""

import json
from collections.abc import Mapping
from typing import Any

from faser.api.dialects.conversion import Json


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
            events += self._begin_if_new({"type": "text", "text": "", "citations": None})
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
