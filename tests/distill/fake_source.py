"""FakeSource: an AnswerSource that computes an answer from the seed and the prompt, and may break down."""

import random
from collections.abc import Sequence

from faser.distill.questions import Answer, OnAnswer
from faser.types.sampling import SamplingParams

_TEXT = "how do cats sleep when rain falls over old towns and why would a river freeze in may"


class BrokenDownError(Exception):
    """The power fails."""


class FakeSource:
    """batches: how many are answered before it breaks down; None: all. questions: texts it gives in turn."""

    def __init__(self, *, batches: int | None = None, questions: Sequence[str] = (), ended: bool = True) -> None:
        self.asked: list[tuple[tuple[int, ...], SamplingParams]] = []
        self._batches = batches
        self._questions = list(questions)
        self._ended = ended

    def answer(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], on_answer: OnAnswer
    ) -> list[Answer]:
        if self._batches == 0:
            raise BrokenDownError
        if self._batches is not None:
            self._batches -= 1
        self.asked += [(tuple(prompt), params) for prompt, params in zip(prompts, sampling, strict=True)]
        found = [self._one(tuple(prompt), params) for prompt, params in zip(prompts, sampling, strict=True)]
        for each in found:
            on_answer(len(each.token_ids))
        return found

    def _one(self, prompt: tuple[int, ...], sampling: SamplingParams) -> Answer:
        draw = random.Random(f"{sampling.seed} {sampling.temperature} {prompt}")
        text = " ".join(draw.choices(_TEXT.split(), k=8)) if not self._questions else self._questions.pop(0)
        length = draw.randint(1, 20)
        return Answer(token_ids=(*(draw.randint(3, 300) for _ in range(length)), 2), text=text, ended=self._ended)
