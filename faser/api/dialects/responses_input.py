"""The input of /v1/responses as messages of a chat.

A conversation comes as a list of items: messages, calls of tools with their outputs, and reasoning. Reasoning,
text and calls that follow each other are one message of the assistant: chat templates write them as one turn.
"""

import json
from collections.abc import Sequence
from typing import Any

from faser.api.bodies.body import shown
from faser.api.dialects.conversion import Json, read_object, read_optional_string, read_string, read_texts, wrong
from faser.api.dialects.responses_calls import GROWING
from faser.api.dialects.responses_tools import SHAPES, full_name
from faser.errors import RequestError

_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "refusal", "text")

# Items with the output of a call, and what they may have instead of call_id.
_OUTPUTS = {
    "function_call_output": "call_id",
    "custom_tool_call_output": "call_id",
    "local_shell_call_output": "id",
    "shell_call_output": "call_id",
    "apply_patch_call_output": "call_id",
}
_CALLS = (*GROWING, *(f"{name}_call" for name in SHAPES))
_READ = f"message, reasoning, {', '.join(_CALLS)} and {', '.join(_OUTPUTS)}"


def items_of(given: str | Sequence[Json]) -> Sequence[Json]:
    """The items of an input. A string is what the user says."""
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given


def chat_messages(
    given: str | Sequence[Json], instructions: str | None, before: Sequence[Json] = ()
) -> list[Json]:
    """Messages of a chat. instructions: a system message before all others. before: items of earlier responses.

    Raises RequestError that names the item, for one that is wrong or of a type that this server does not read.
    """
    turns = _Turns()
    if instructions is not None:
        turns.add({"role": "system", "content": instructions})
    given = items_of(given)
    if not given:
        raise RequestError("input is an empty list; it must have at least one item", param="input")
    for at, item in enumerate((*before, *given)):
        _read_item(item, f"input.{at - len(before)}", turns)
    if not before and all(item.get("type") == "reasoning" for item in given):
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
        case str() if kind in _CALLS:
            turns.assistant("tool_calls").setdefault("tool_calls", []).append(_read_call(kind, item, path))
        case str() if kind in _OUTPUTS:
            turns.add(
                {
                    "role": "tool",
                    "tool_call_id": read_string(item, "call_id" if item.get("call_id") else _OUTPUTS[kind], path),
                    "content": _read_output(kind, item, path),
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


def _read_call(kind: str, item: Json, path: str) -> Json:
    """The call of a function that an item is, as chats have it."""
    if kind in GROWING:
        namespace = read_optional_string(item, "namespace", path)
        name = full_name(read_string(item, "name", path), namespace)
        arguments = read_string(item, GROWING[kind][0], path)
        if kind == "custom_tool_call":
            arguments = json.dumps({"input": arguments}, ensure_ascii=False)
    else:
        name = kind.removesuffix("_call")
        shape = SHAPES[name]
        field = read_object(item.get(shape.field), f"{path}.{shape.field}")
        arguments = json.dumps(shape.arguments_of(field), ensure_ascii=False)
    function = {"name": name, "arguments": arguments}
    return {"id": read_string(item, "call_id", path), "type": "function", "function": function}


def _read_output(kind: str, item: Json, path: str) -> str | list[Json]:
    output = item.get("output")
    if kind == "apply_patch_call_output" and output is None:
        return read_string(item, "status", path)
    if kind != "shell_call_output" or isinstance(output, str):
        return read_texts(output, f"{path}.output", _TEXT_PARTS)
    if not isinstance(output, list):
        raise wrong(output, f"{path}.output", "a list of outputs of commands")
    return "\n".join(_command_output(each, f"{path}.output.{at}") for at, each in enumerate(output))


def _command_output(given: Any, path: str) -> str:
    """The words that a command wrote, and how it ended."""
    output = read_object(given, path)
    outcome = read_object(output.get("outcome"), f"{path}.outcome")
    ended = "timed out" if outcome.get("type") == "timeout" else f"exit code {outcome.get('exit_code')}"
    texts = [output.get("stdout"), output.get("stderr"), ended]
    return "\n".join(text for text in texts if isinstance(text, str) and text)


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
