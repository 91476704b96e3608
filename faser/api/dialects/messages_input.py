"""Messages of Anthropic's dialect as those of a chat: their blocks become text, results, thinking and calls."""

from collections.abc import Iterator, Sequence
from typing import Any

from faser.api.bodies.body import shown
from faser.api.dialects.conversion import Json, read_object, read_string, read_text, read_texts, wrong
from faser.errors import RequestError

_TEXT = ("text",)
_READABLE = ("text", "document", "search_result", "tool_reference")

# Claude Code begins its system prompt with a block of these words, which differs from session to session: in front
# of all other tokens it would keep every session from the cached prompt of the last one.
_BILLING_LINE = "x-anthropic-billing-header:"


def chat_messages(messages: Sequence[Json], system: str | list[Json] | None) -> list[Json]:
    """Messages of a chat. system: a message before all others.

    Raises RequestError that names the block, for one that is wrong or of a type that this server does not read.
    """
    if not messages:
        raise RequestError("messages is an empty list; it must have at least one message", param="messages")
    read: list[Json] = []
    if isinstance(system, list) and system and str(system[0].get("text")).startswith(_BILLING_LINE):
        system = system[1:]
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
    """Yield the messages of a user's turn: text, and one for each result of a tool, in the blocks' order."""
    if isinstance(content, str):
        yield {"role": "user", "content": content}
        return
    texts: list[Json] = []
    for at, block in enumerate(_blocks(content, path)):
        where = f"{path}.{at}"
        if block.get("type") != "tool_result":
            texts.append(_text_part(block, where, (*_READABLE, "tool_result")))
            continue
        if texts:
            yield {"role": "user", "content": texts}
            texts = []
        result = block.get("content")
        yield {
            "role": "tool",
            "tool_call_id": read_string(block, "tool_use_id", where),
            "content": _result(result, f"{where}.content"),
        }
    if texts or not content:
        yield {"role": "user", "content": texts}


def _result(content: Any, path: str) -> str | list[Json]:
    """The result of a tool: a string or text parts, as chats have it."""
    if content is None or isinstance(content, str):
        return content or ""
    return [_text_part(block, f"{path}.{at}", _READABLE) for at, block in enumerate(_blocks(content, path))]


def _text_part(block: Json, path: str, kinds: Sequence[str]) -> Json:
    """A part of text from a block that has nothing else. kinds: the types that the block may have, for errors."""
    match block.get("type"):
        case "document":
            text = _document(block, path)
        case "search_result":
            found = _joined(read_texts(block.get("content"), f"{path}.content", _TEXT))
            text = "\n".join([read_string(block, "title", path), read_string(block, "source", path), found])
        case "tool_reference":
            text = read_string(block, "tool_name", path)
        case _:
            text = read_text(block, path, kinds)
    return {"type": "text", "text": text}


def _document(block: Json, path: str) -> str:
    """The title, the context and the text of a document. Raises RequestError for a source that is no text."""
    source = read_object(block.get("source"), f"{path}.source")
    match source.get("type"):
        case "text":
            text = read_string(source, "data", f"{path}.source")
        case "content":
            text = _joined(read_texts(source.get("content"), f"{path}.source.content", _TEXT))
        case kind:
            raise RequestError(
                f"{path}.source.type is {shown(kind)}; it must be text or content: this model reads text only",
                param=f"{path}.source.type",
            )
    return "\n".join([*(block[key] for key in ("title", "context") if isinstance(block.get(key), str)), text])


def _joined(content: str | list[Json]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


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
                            "arguments": _input(block.get("input"), f"{where}.input"),
                        },
                    }
                )
            case "redacted_thinking":
                pass  # only the server that wrote it can read it, and templates drop the thinking of earlier turns
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


def _input(value: Any, path: str) -> str | Json:
    """The input of a call: an object, or the text of one that was cut off."""
    return value if isinstance(value, str) else read_object(value, path)


def _blocks(content: Any, path: str) -> list[Json]:
    if not isinstance(content, list):
        raise wrong(content, path, "a string or a list of blocks")
    return [read_object(block, f"{path}.{at}") for at, block in enumerate(content)]
