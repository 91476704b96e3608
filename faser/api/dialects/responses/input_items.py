"""The input of a response as the messages of a chat.

A conversation comes as a list of items: messages, function calls with their outputs, and reasoning. Reasoning,
text and calls that follow each other are one message of the assistant: chat templates write them as one turn.
"""

from collections.abc import Sequence
from typing import Any

from faser.api.dialects.conversion import Json, read_string, read_texts, wrong
from faser.api.protocol.body import shown
from faser.errors import RequestError

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "refusal", "text")
_READ = "message, function_call, function_call_output and reasoning"


def chat_messages(given: str | Sequence[Json], instructions: str | None) -> list[Json]:
    """Messages of a chat. instructions: a system message before all others.

    Raises RequestError that names the item, for one that is wrong or of a type that this server does not read.
    """
    turns = _Turns()
    if instructions is not None:
        turns.add({"role": "system", "content": instructions})
    if isinstance(given, str):
        turns.add({"role": "user", "content": given})
        return turns.messages
    if not given:
        raise RequestError("input is an empty list; it must have at least one item", param="input")
    for at, item in enumerate(given):
        _read_item(item, f"input.{at}", turns)
    if all(item.get("type") == "reasoning" for item in given):
        raise RequestError("input has nothing but reasoning; it must have a message to answer", param="input")
    for message in turns.messages:
        if "tool_calls" not in message:
            message.setdefault("content", "")  # a turn of reasoning only
    return turns.messages


class _Turns:
    """Messages in order; what the assistant says in succession is collected in one."""

    def __init__(self) -> None:
        self.messages: list[Json] = []

    def add(self, message: Json) -> None:
        self.messages.append(message)

    def assistant(self, key: str) -> Json:
        """The assistant's message to which key is added next: the last one, unless it is further than that."""
        later = {"reasoning_content": ("content", "tool_calls"), "content": ("tool_calls",), "tool_calls": ()}[key]
        last = self.messages[-1] if self.messages else {}
        taken = key in last and key != "tool_calls"
        if last.get("role") != "assistant" or taken or any(each in last for each in later):
            last = {"role": "assistant"}
            self.messages.append(last)
        return last


def _read_item(item: Json, path: str, turns: _Turns) -> None:
    kind = item.get("type", "message" if "role" in item else None)
    match kind:
        case "message":
            _read_message(item, path, turns)
        case "reasoning":
            if reasoning := _read_reasoning(item, path):
                turns.assistant("reasoning_content")["reasoning_content"] = reasoning
        case "function_call":
            call = {
                "id": read_string(item, "call_id", path),
                "type": "function",
                "function": {
                    "name": read_string(item, "name", path),
                    "arguments": read_string(item, "arguments", path),
                },
            }
            turns.assistant("tool_calls").setdefault("tool_calls", []).append(call)
        case "function_call_output":
            turns.add(
                {
                    "role": "tool",
                    "tool_call_id": read_string(item, "call_id", path),
                    "content": read_texts(item.get("output"), f"{path}.output", _TEXT_PARTS),
                }
            )
        case "item_reference":
            raise RequestError(
                f"{path} is an item_reference; this server stores no items, so send the item itself",
                param=f"{path}.type",
            )
        case _:
            raise RequestError(
                f"{path}.type is {shown(kind)}; this server reads items of the types {_READ}", param=f"{path}.type"
            )


def _read_message(item: Json, path: str, turns: _Turns) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise wrong(role, f"{path}.role", f"one of {', '.join(_ROLES)}")
    content = read_texts(item.get("content"), f"{path}.content", _TEXT_PARTS)
    if role == "assistant":
        turns.assistant("content")["content"] = content
    else:
        turns.add({"role": role, "content": content})


def _read_reasoning(item: Json, path: str) -> str:
    """The reasoning in words, or else its summary."""
    if item.get("encrypted_content") is not None:
        raise RequestError(
            f"`{path}.encrypted_content` is not supported: only the server that encrypted reasoning can read it",
            param=f"{path}.encrypted_content",
        )
    parts: Any = item.get("content") or item.get("summary") or []
    texts = read_texts(parts, f"{path}.content", ("reasoning_text", "summary_text", "text"))
    return texts if isinstance(texts, str) else "".join(part["text"] for part in texts)
