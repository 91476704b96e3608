"""Messages for templates that are strict about them: which message a prompt lacks, and other orders to try.

Some templates raise on a system message that is not the first, on a developer, or on two turns of one role in a
row; others leave out what they do not expect. Text is moved and joined then, and none is lost.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Message = dict[str, Any]
SYSTEM_ROLES = ("system", "developer")
_MAY_BE_SHORTENED = ("assistant", "tool")  # templates leave out earlier thoughts, and rewrite results
_BETWEEN = "\n\n"


def as_they_are(messages: Sequence[Message]) -> list[Message]:
    return [*messages]


def merge_turns(messages: Sequence[Message]) -> list[Message]:
    """Move the system messages to the front as one, and join turns of one role that follow one another."""
    system = [each for each in messages if each["role"] in SYSTEM_ROLES]
    merged: list[Message] = []
    if system:
        merged.append({**system[0], "role": "system", "content": _joined(system)})
    for message in messages:
        if message["role"] in SYSTEM_ROLES:
            continue
        last = merged[-1] if merged else None
        if last is not None and last["role"] == message["role"] and message["role"] != "tool":
            calls = [*(last.get("tool_calls") or ()), *(message.get("tool_calls") or ())]
            joined = {**last, **message, "content": _joined((last, message))}
            merged[-1] = {**joined, "tool_calls": calls} if calls else joined
        else:
            merged.append(message)
    return merged


def fold_system(messages: Sequence[Message]) -> list[Message]:
    """Do the same, with the system message as the beginning of the first one of the user."""
    merged = merge_turns(messages)
    if not merged or merged[0]["role"] != "system":
        return merged
    system, *rest = merged
    at = next((at for at, each in enumerate(rest) if each["role"] == "user"), None)
    if at is None:
        return [{**system, "role": "user"}, *rest]
    return [*rest[:at], {**rest[at], "content": _joined((system, rest[at]))}, *rest[at + 1 :]]


ORDERS: tuple[Callable[[Sequence[Message]], list[Message]], ...] = (as_they_are, merge_turns, fold_system)


def first_lost(messages: Sequence[Message], prompt: str) -> int | None:
    """Return the first message whose text the prompt lacks; None: it has all of them.

    Templates may trim a text, write it as JSON, and take switches such as /no_think out of a system message.
    """
    spaceless: str | None = None
    for at, message in enumerate(messages):
        content = message["content"]
        if message["role"] in _MAY_BE_SHORTENED or any(text in prompt for text in _spellings(content.strip())):
            continue
        if message["role"] in SYSTEM_ROLES and _mostly(content, prompt):
            continue
        if spaceless is None:
            spaceless = _letters(prompt)
        if not any(_letters(text) in spaceless for text in _spellings(content)):
            return at
    return None


def _spellings(text: str) -> Iterator[str]:
    """The text, and as it stands in JSON."""
    yield text
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text)[1:-1]


def _letters(text: str) -> str:
    """The text without its white space, and without the difference of capitals."""
    return "".join(text.split()).casefold()


def _mostly(content: str, prompt: str) -> bool:
    """Return whether the prompt has over half of the content's words, switches such as /no_think aside."""
    words = [word for word in content.split() if not word.startswith("/")]
    return not words or 2 * sum(word in prompt for word in words) > len(words)


def _joined(messages: Sequence[Message]) -> str:
    return _BETWEEN.join(each["content"] for each in messages if each["content"])
