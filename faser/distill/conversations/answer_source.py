"""AnswerSource: what computes questions and answers. An engine in this process does; tests have a fake."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from faser.types import SamplingParams

OnAnswer = Callable[[int], None]  # takes the number of tokens of an answer that has just ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What continues one prompt. token_ids: with the end token, if there is one. ended: not cut off by a limit."""

    token_ids: tuple[int, ...]
    text: str
    ended: bool


class AnswerSource(Protocol):
    """A model that continues prompts."""

    def answer(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], on_answer: OnAnswer
    ) -> list[Answer]:
        """Continue all prompts as one batch; answers have the order of the prompts."""
        ...
