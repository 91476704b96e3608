"""Recorded traffic: conversations with the answers that a server gave, one a line, as JSON.

{"messages": [...], "answer": "..."} or {"prompt": "...", "answer": "..."}; a line may have "temperature" and
"finish_reason": "stop" (which is taken for granted) or "length". An answer with a "stop_reason" was cut off, too.
{"prompt_token_ids": [...], "answer_token_ids": [...]} gives the tokens themselves, which are the exact ones: a
text can be divided otherwise than it was made. `faser serve --record-traffic` writes such lines.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from faser.distill.conversations.chat_turns import ChatTurns
from faser.distill.conversations.question_file import messages_of
from faser.distill.conversations.shard import Conversation
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import ConfigError, RequestError

_FORM = '{"messages": [{"role": "user", "content": "Hello"}], "answer": "Hi!"}'


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

    def __iter__(self) -> Iterator[Conversation]:
        try:
            with self._path.open(encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield self._conversation(line, f"--from-traffic is {self._path}; its line {number}")
        except UnicodeDecodeError:
            raise ConfigError(f"--from-traffic is {self._path}; it must be text in UTF-8") from None
        except OSError as error:
            raise ConfigError(f"--from-traffic is {self._path}; it cannot be read: {error.strerror}") from None

    def _conversation(self, line: str, named: str) -> Conversation:
        try:
            record = json.loads(line)
            ended = record.get("finish_reason", "stop") == "stop" and record.get("stop_reason") is None
            temperature = float(record.get("temperature", math.nan))
            prompt, answer = self._tokens(record)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
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
        return Conversation(prompt=prompt, answer=answer, ended=ended, temperature=temperature)

    def _tokens(self, record: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if "answer_token_ids" in record:
            return self._checked(record["prompt_token_ids"]), self._checked(record["answer_token_ids"])
        answer = self._tokenizer.encode(record["answer"], add_special_tokens=False)
        if self._turns is None:
            return tuple(self._tokenizer.encode(record["prompt"])), tuple(answer)
        return tuple(self._turns.answer_prompt(messages_of(record))), tuple(answer)

    def _checked(self, ids: Sequence[Any]) -> tuple[int, ...]:
        for each in ids:
            if not isinstance(each, int):
                raise ValueError(f"{each} is not a token")
        return tuple(ids)
