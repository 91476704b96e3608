"""SelfAskedQuestions: a model asks itself, by continuing its chat template where the user's turn begins.

Every second question begins as the model likes, the others with first words that spread them over kinds of tasks.
The first words are ours and name no subject: that is the model's to choose.

Source: Xu et al. (Magpie), arXiv:2406.08464.
"""

from collections.abc import Callable
from dataclasses import dataclass

from faser.distill.conversations.answer_source import AnswerSource
from faser.distill.conversations.chat_turns import ChatTurns
from faser.distill.conversations.dataset import Dataset
from faser.distill.conversations.question_filter import QuestionFilter
from faser.distill.conversations.questions import QuestionBatch, derived_seed
from faser.errors import ConfigError
from faser.types import SamplingParams

_MIN_KEPT = 0.05  # share of questions; a model below it was not trained on what users say

_BEGINNINGS = (
    "How do I",
    "How does",
    "How can we",
    "What is",
    "What are the",
    "What happens when",
    "Why is",
    "Why do",
    "When did",
    "Where can I",
    "Who was",
    "Which of",
    "Can you explain",
    "Can you help me",
    "Could you",
    "Is it",
    "Should I",
    "I want to",
    "I am trying to",
    "My",
    "Tell me",
    "Give me",
    "Give an example of",
    "Explain",
    "Describe",
    "Compare",
    "List",
    "Name three",
    "Suggest",
    "Plan",
    "Write a short story about",
    "Write an email",
    "Write a poem about",
    "Write a function that",
    "Write a Python program that",
    "Write instructions",
    "Draft",
    "Imagine",
    "Pretend you are",
    "Summarize the following text:",
    "Summarize this article in two sentences:",
    "Read the text and answer the question.",
    "Rewrite the following sentence",
    "Translate the following sentence",
    "Correct the mistakes in this paragraph:",
    "Classify",
    "Extract",
    "Convert",
    "Calculate",
    "Solve the following problem:",
    "A train",
    "A shop sells",
    "If",
    "Given",
    "Given the following passage,",
    "Here is a table",
    "Here is some code:",
    "Fix the bug in",
    "What would you do",
    "Discuss",
    "Argue",
    "Outline",
    "Act as",
    "Let's",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskingSettings:
    """How questions are sampled. per_shard: before the filter. max_tokens: longer ones are dropped."""

    seed: int = 0
    per_shard: int = 768
    temperature: float = 1.0
    top_p: float = 0.95
    max_tokens: int = 256


class SelfAskedQuestions:
    """Questions of one model, none twice."""

    def __init__(self, source: AnswerSource, turns: ChatTurns, settings: AskingSettings) -> None:
        self._source = source
        self._turns = turns
        self._settings = settings
        self._filter: QuestionFilter | None = None

    def next_batch(self, dataset: Dataset, on_question: Callable[[], None]) -> QuestionBatch:
        """Raises ConfigError if hardly any question can be used."""
        if self._filter is None:
            shards = dataset.shards()
            self._filter = QuestionFilter(
                self._turns.question_of(each.prompt) for shard in shards for each in shard
            )
        settings, known = self._settings, self._filter
        known.dropped.clear()
        indices = range(dataset.asked, dataset.asked + settings.per_shard)
        beginnings = [_beginning(settings.seed, index) for index in indices]
        sampling = [
            SamplingParams(
                temperature=settings.temperature,
                top_p=settings.top_p,
                max_tokens=settings.max_tokens,
                stop_token_ids=self._turns.question_ends,
                stop=self._turns.stop_texts,
                seed=derived_seed(settings.seed, "question", index),
            )
            for index in indices
        ]
        prompts = [self._turns.question_prompt(each) for each in beginnings]
        found = self._source.answer(prompts, sampling, lambda _tokens: on_question())
        texts = [(first_words + each.text).strip() for first_words, each in zip(beginnings, found, strict=True)]
        kept = [text for text, each in zip(texts, found, strict=True) if known.takes(text, ended=each.ended)]
        dropped = dict(sorted(known.dropped.items()))
        if len(kept) < max(1, _MIN_KEPT * len(texts)):
            raise ConfigError(
                f"of {len(texts)} questions that the model asked itself {len(kept)} can be used "
                f"(dropped: {dropped}); "
                "it was not trained on what users say: give questions with --prompts, or recorded text with "
                "--from-traffic"
            )
        conversations = [[{"role": "user", "content": text}] for text in kept]
        return QuestionBatch(conversations=conversations, asked=len(texts), dropped=dropped)


def _beginning(seed: int, index: int) -> str:
    if index % 2 == 0:
        return ""
    return _BEGINNINGS[derived_seed(seed, "beginning", index) % len(_BEGINNINGS)]
