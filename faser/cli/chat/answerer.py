"""Answerer: where the answers of a conversation come from. remote.py asks a server, local.py runs a model."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLimits:
    """Limits of each answer. None: the model's default. json_schema: the answer matches it; None: free text."""

    max_tokens: int | None = None
    temperature: float | None = None
    json_schema: dict[str, Any] | None = None


class Answerer(Protocol):
    """A source of answers. Its context is entered before the first question and exited after the last."""

    def answer(self, messages: Sequence[Message]) -> Generator[str, None, None]:
        """The answer's text in pieces; closing the generator aborts the answer. Raises FaserError."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...
