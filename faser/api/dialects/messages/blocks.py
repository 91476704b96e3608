"""Messages with blocks of content as the messages of a chat."""

from collections.abc import Iterator, Sequence
from typing import Any

from faser.api.dialects.conversion import Json, read_object, read_string, read_text, read_texts, wrong
from faser.api.protocol.body import shown
from faser.errors import RequestError

_TEXT = ("text",)


def chat_messages(messages: Sequence[Json], system: str | list[Json] | None) -> list[Json]:
    """Messages of a chat. system: a message before all others.

    Raises RequestError that names the block, for one that is wrong or of a type that this server does not read.
    """
    if not messages:
        raise RequestError("messages is an empty list; it must have at least one message", param="messages")
    read: list[Json] = []
    if system:
        read.append({"role": "system", "content": read_texts(system, "system", _TEXT)})
    for at, message in enumerate(messages):
        path = f"messages.{at}"
        content = message.get("content")
        if content is None:
            raise RequestError(f"{path}.content is missing; it is required", param=f"{path}.content")
        match message.get("role"):
            case "user":
                read += _user(content, f"{path}.content")
            case "assistant":
                read.append(_assistant(content, f"{path}.content"))
            case "system":
                read.append({"role": "system", "content": read_texts(content, f"{path}.content", _TEXT)})
            case role:
                raise wrong(role, f"{path}.role", "user or assistant")
    return read


def _user(content: Any, path: str) -> Iterator[Json]:
    """What the user says, and a message for each result of a tool, in the order of the blocks."""
    if isinstance(content, str):
        yield {"role": "user", "content": content}
        return
    texts: list[Json] = []
    for at, block in enumerate(_blocks(content, path)):
        where = f"{path}.{at}"
        if block.get("type") != "tool_result":
            texts.append({"type": "text", "text": read_text(block, where, ("text", "tool_result"))})
            continue
        if texts:
            yield {"role": "user", "content": texts}
            texts = []
        result = block.get("content")
        yield {
            "role": "tool",
            "tool_call_id": read_string(block, "tool_use_id", where),
            "content": "" if result is None else read_texts(result, f"{where}.content", _TEXT),
        }
    if texts or not content:
        yield {"role": "user", "content": texts}


def _assistant(content: Any, path: str) -> Json:
    """One message: thinking, text and calls. Blocks of text are joined as they are, as pieces of one answer."""
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts: list[str] = []
    thinking: list[str] = []
    calls: list[Json] = []
    for at, block in enumerate(_blocks(content, path)):
        where = f"{path}.{at}"
        match block.get("type"):
            case "text":
                texts.append(read_text(block, where, _TEXT))
            case "thinking":
                thinking.append(read_string(block, "thinking", where))
            case "tool_use":
                calls.append(
                    {
                        "id": read_string(block, "id", where),
                        "type": "function",
                        "function": {
                            "name": read_string(block, "name", where),
                            "arguments": read_object(block.get("input"), f"{where}.input"),
                        },
                    }
                )
            case "redacted_thinking":
                raise RequestError(
                    f"`{where}` is not supported: only the server that redacted thinking can read it",
                    param=f"{where}.type",
                )
            case kind:
                raise RequestError(
                    f"{where}.type is {shown(kind)}; it must be text, thinking or tool_use", param=f"{where}.type"
                )
    message: Json = {"role": "assistant", "content": "".join(texts)}
    if thinking:
        message["reasoning_content"] = "".join(thinking)
    if calls:
        message["tool_calls"] = calls
    return message


def _blocks(content: Any, path: str) -> list[Json]:
    if not isinstance(content, list):
        raise wrong(content, path, "a string or a list of blocks")
    return [read_object(block, f"{path}.{at}") for at, block in enumerate(content)]
