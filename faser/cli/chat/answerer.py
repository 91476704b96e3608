"""The seam between a conversation and whoever answers: chat_remote asks a server, chat_local runs a model."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLimits:
    """How answers are made. None leaves it to the model and its context."""

    max_tokens: int | None = None
    temperature: float | None = None


class Answerer(Protocol):
    """Where answers come from. Entered before the first question, left after the last."""

    def answer(self, messages: Sequence[Message]) -> Generator[str, None, None]:
        """Pieces of the answer as they come; closing the iterator stops the answer. Raises FaserError."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...
