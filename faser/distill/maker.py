"""ConversationMaker: answers the questions of a source until a dataset holds enough.

A shard follows from the seed, its place and the shards before it: an interrupted one is made again, the same.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from faser.distill.dataset import Dataset, RecordedConversation, Shard
from faser.distill.questions import AnswerSource, ChatTurns, QuestionBatch, Questions, derived_seed
from faser.types.engine import ProgressCallback
from faser.types.sampling import SamplingParams

_TRAFFIC_PER_SHARD = 1024  # conversations


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSettings:
    """Sampling of answers: in turn with each of the temperatures, at most max_tokens long.

    context: most tokens of a prompt and its answer; None: any.
    """

    seed: int = 0
    temperatures: tuple[float, ...] = (0.0, 0.8)
    max_tokens: int = 256
    context: int | None = None

    def longest(self, prompt: Sequence[int]) -> int:
        """Most tokens of the answer to a prompt; 0: it leaves no room."""
        return self.max_tokens if self.context is None else min(self.max_tokens, self.context - len(prompt))


class ConversationMaker:
    """Fills one dataset. report: takes the progress. say: takes a line about each finished shard."""

    def __init__(
        self,
        dataset: Dataset,
        source: AnswerSource,
        turns: ChatTurns,
        settings: AnswerSettings,
        *,
        report: ProgressCallback,
        say: Callable[[str], None],
    ) -> None:
        self._dataset = dataset
        self._source = source
        self._turns = turns
        self._settings = settings
        self._report = report
        self._say = say

    def fill(self, questions: Questions, wanted: int) -> None:
        """Add shards until the dataset has as many tokens of answers as wanted, or there are no more questions."""
        dataset = self._dataset
        while dataset.answer_tokens < wanted:
            began_s = time.monotonic()
            done = dataset.answer_tokens
            batch = questions.next_batch(dataset, lambda done=done: self._report("questions", done, wanted))  # type: ignore[misc]
            if batch is None:
                return
            shard = Shard.of(self._answers(batch, wanted))
            seconds = time.monotonic() - began_s
            record = dataset.add(shard, asked=batch.asked, dropped=batch.dropped, seconds=round(seconds, 1))
            dropped = ", ".join(f"{count} {reason}" for reason, count in batch.dropped.items())
            self._say(
                f"{record.file}: {record.conversations} of {batch.asked} questions kept"
                f"{f' (dropped: {dropped})' if dropped else ''}, {record.answer_tokens} tokens of answers in "
                f"{seconds:.0f} s, {record.answer_tokens / seconds:.0f} tokens/s; "
                f"{dataset.answer_tokens} of {wanted}"
            )

    def _answers(self, batch: QuestionBatch, wanted: int) -> list[RecordedConversation]:
        settings, first, done = self._settings, self._dataset.conversations, self._dataset.answer_tokens
        rendered = [self._turns.answer_prompt(each) for each in batch.conversations]
        prompts = [each for each in rendered if settings.longest(each) > 0]
        places = range(first, first + len(prompts))
        temperatures = [settings.temperatures[place % len(settings.temperatures)] for place in places]
        sampling = [
            SamplingParams(
                temperature=temperature,
                max_tokens=settings.longest(prompt),
                seed=derived_seed(settings.seed, "answer", place),
            )
            for prompt, place, temperature in zip(prompts, places, temperatures, strict=True)
        ]

        def count(tokens: int) -> None:
            nonlocal done
            done += tokens
            self._report("answers", min(done, wanted), wanted)

        answers = self._source.answer(prompts, sampling, count)
        return [
            RecordedConversation(
                prompt=tuple(prompt), answer=each.token_ids, ended=each.ended, temperature=temperature
            )
            for prompt, each, temperature in zip(prompts, answers, temperatures, strict=True)
        ]


def fill_from_traffic(dataset: Dataset, conversations: Iterable[RecordedConversation], wanted: int | None) -> None:
    """Store conversations as they were recorded, from where the dataset ends; wanted: tokens; None: all."""
    limit = math.inf if wanted is None else wanted
    remaining = islice(conversations, dataset.conversations, None)
    while dataset.answer_tokens < limit and (found := list(islice(remaining, _TRAFFIC_PER_SHARD))):
        dataset.add(Shard.of(found))
