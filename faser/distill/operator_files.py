"""Files that an operator brings: questions, which the model answers, each twice; and recorded traffic.

A line of recorded traffic is a conversation with the answer that a server gave, as JSON:

{"messages": [...], "answer": "..."} or {"prompt": "...", "answer": "..."}; a line may have "temperature" and
"finish_reason": "stop" (which is taken for granted) or "length". An answer with a "stop_reason" was cut off, too.
{"prompt_token_ids": [...], "answer_token_ids": [...]} gives the tokens themselves, which are the exact ones: a
text can be divided otherwise than it was made. `faser serve --record-traffic` writes such lines.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from faser.distill.dataset import Dataset, RecordedConversation
from faser.distill.questions import ChatTurns, Message, QuestionBatch
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import ConfigError, RequestError

_PER_SHARD = 768
_PASSES = 2  # over the file: each question is answered at both temperatures
_FORMS = '{"prompt": "Hello"}, {"messages": [{"role": "user", "content": "Hello"}]} or {"turns": ["Hello"]}'
_FORM = '{"messages": [{"role": "user", "content": "Hello"}], "answer": "Hi!"}'


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
    return [{"role": "user", "content": _text(text)}]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a question or an answer is a text")
    return value


class TrafficFile:
    """A file of recorded conversations. Reading it raises ConfigError that names a line of another form."""

    def __init__(
        self,
        path: Path,
        tokenizer: Tokenizer,
        turns: ChatTurns | None,
        eos_token_id: int | None,
        *,
        vocab_size: int,
    ) -> None:
        """turns: None for a model without chat template: then every line must have tokens, or a prompt as text.

        vocab_size: of the model, which may have fewer tokens than its tokenizer.
        """
        self._path = path
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._turns = turns
        self._eos_token_id = eos_token_id

    def __iter__(self) -> Iterator[RecordedConversation]:
        try:
            with self._path.open(encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield self._conversation(line, f"--from-traffic is {self._path}; its line {number}")
        except UnicodeDecodeError:
            raise ConfigError(f"--from-traffic is {self._path}; it must be text in UTF-8") from None
        except OSError as error:
            raise ConfigError(f"--from-traffic is {self._path}; it cannot be read: {error.strerror}") from None

    def _conversation(self, line: str, named: str) -> RecordedConversation:
        try:
            record = json.loads(line)
            ended = record.get("finish_reason", "stop") == "stop" and record.get("stop_reason") is None
            temperature = float(record.get("temperature", math.nan))
            prompt, answer = self._tokens(record)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError):
            raise ConfigError(f"{named} must be JSON such as {_FORM}") from None
        except RequestError as error:
            raise ConfigError(f"{named}: {error}") from None
        if not prompt or not answer:
            raise ConfigError(
                f"{named} has {len(prompt)} tokens of prompt and {len(answer)} of answer; each needs one"
            )
        for token_id in (min(*prompt, *answer), max(*prompt, *answer)):
            if not 0 <= token_id < self._vocab_size:
                raise ConfigError(f"{named} has token id {token_id}; the model has {self._vocab_size} tokens")
        last = self._eos_token_id
        if ended and last is not None and answer[-1] != last:
            answer = (*answer, last)
        return RecordedConversation(prompt=prompt, answer=answer, ended=ended, temperature=temperature)

    def _tokens(self, record: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if "answer_token_ids" in record:
            return self._checked(record["prompt_token_ids"]), self._checked(record["answer_token_ids"])
        answer = self._tokenizer.encode(_text(record["answer"]), add_special_tokens=False)
        if self._turns is None:
            return tuple(self._tokenizer.encode(_text(record["prompt"]))), tuple(answer)
        return tuple(self._turns.answer_prompt(messages_of(record))), tuple(answer)

    def _checked(self, ids: Sequence[Any]) -> tuple[int, ...]:
        for each in ids:
            if not isinstance(each, int):
                raise ValueError(f"{each} is not a token")
        return tuple(ids)
