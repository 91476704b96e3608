"""FileQuestions: conversations from a file of the operator, which the model answers, each twice."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faser.distill.conversations.dataset import Dataset
from faser.distill.conversations.questions import Message, QuestionBatch
from faser.errors import ConfigError

_PER_SHARD = 768
_PASSES = 2  # over the file: each question is answered at both temperatures

_FORMS = '{"prompt": "Hello"}, {"messages": [{"role": "user", "content": "Hello"}]} or {"turns": ["Hello"]}'


class FileQuestions:
    """The questions of a file, in order, then once more for the other temperature."""

    def __init__(self, conversations: list[list[Message]]) -> None:
        self._conversations = conversations

    def next_batch(self, dataset: Dataset, on_question: Callable[[], None]) -> QuestionBatch | None:
        del on_question  # they are there already
        count = len(self._conversations)
        # Places take turns with the temperatures: after an even number the second pass begins one place later.
        later = 1 - count % 2
        order = [(place + later * turn) % count for turn in range(_PASSES) for place in range(count)]
        chosen = order[dataset.asked : dataset.asked + _PER_SHARD]
        if not chosen:
            return None
        return QuestionBatch(conversations=[self._conversations[each] for each in chosen], asked=len(chosen))


def read_conversations(path: Path) -> list[list[Message]]:
    """Conversations that end with the user's turn: JSON lines, or one question a line.

    Raises ConfigError that names the file, and the line that has another form.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"--prompts is {path}; it must be text in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"--prompts is {path}; it cannot be read: {error.strerror}") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"--prompts is {path}; it holds no question")
    if path.suffix != ".jsonl":
        return [[{"role": "user", "content": line.strip()}] for _, line in numbered]
    return [_conversation(line, f"--prompts is {path}; its line {number}") for number, line in numbered]


def _conversation(line: str, named: str) -> list[Message]:
    try:
        record: Any = json.loads(line)
        messages = messages_of(record)
        last_role = messages[-1]["role"]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f"{named} must be JSON such as {_FORMS}") from None
    if last_role != "user":
        raise ConfigError(f"{named} ends with a message of the {last_role}; it must end with the user's")
    return messages


def messages_of(record: dict[str, Any]) -> list[Message]:
    """The messages of a record. Raises one of several built-in errors for another form."""
    if "messages" in record:
        return [{**each, "role": str(each["role"])} for each in record["messages"]]
    text = record["prompt"] if "prompt" in record else record["turns"][0]
    if not isinstance(text, str):
        raise TypeError("a question is a text")
    return [{"role": "user", "content": text}]
