"""Questions for a model to answer, which the model asks itself: it continues its chat template in the user's turn.

A model that was trained on whole conversations continues a prompt that ends where the user's turn begins with a
question of its own. Every second question begins as the model likes, the others with first words that spread them
over kinds of tasks. The first words are ours and name no subject: that is the model's to choose. QuestionFilter
drops what is not worth an answer. Knows no torch; an AnswerSource computes.

Source: Xu et al. (Magpie), arXiv:2406.08464.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

from faser.api.requests.chat_template import ChatTemplate
from faser.distill.dataset import Dataset
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import ConfigError, ModelError, RequestError
from faser.types import SamplingParams

OnAnswer = Callable[[int], None]  # takes the number of tokens of an answer that has just ended
Message = Mapping[str, Any]
_MARK = "\ue000question\ue001"  # no template treats private characters in a way of its own
_MIN_KEPT = 0.05  # share of questions; a model below it was not trained on what users say
_MIN_CHARS = 8
_MIN_LETTERS = 0.5  # share of letters and spaces: lists of numbers and bars of signs have less
_MIN_NEW_WORDS = 0.35  # share of different words in a long question; loops have less
_LONG = 20  # words
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


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionBatch:
    """conversations: lists of messages that end with the user's. asked: as many were tried. dropped: by reason."""

    conversations: Sequence[Sequence[Message]]
    asked: int
    dropped: Mapping[str, int] = field(default_factory=dict)


class Questions(Protocol):
    """A source of conversations. What it gives follows from the dataset's shards and from its own settings."""

    def next_batch(self, dataset: Dataset, on_question: Callable[[], None]) -> QuestionBatch | None:
        """The questions of the next shard; None: there are no more. on_question: called after each sampled one."""
        ...


class ChatTurns:
    """The turns of one model. Raises ModelError for a model without a chat template, or with one that hides turns.

    question_ends: ids of the tokens that end a question. stop_texts: texts that do, where no token does.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        source = tokenizer.chat_template
        if isinstance(source, Mapping):
            source = source.get("default")
        if not isinstance(source, str):
            raise ModelError(
                "the model has no chat template, so it cannot be asked for questions: give one with "
                "--chat-template, or text to learn from with --from-traffic"
            )
        self._tokenizer = tokenizer
        self._template = ChatTemplate(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
        before, found, after = self._render([{"role": "user", "content": _MARK}]).partition(_MARK)
        if not found:
            raise ModelError("the chat template leaves out what a user says; give another with --chat-template")
        first = tokenizer.encode(after, add_special_tokens=False)[:1]
        special = [each for each in first if tokenizer.is_special(each)]
        self.question_ends = tuple(sorted({*eos_token_ids, *special}))
        # Without a token that ends the turn, the first line that the template writes after it does.
        self.stop_texts = () if special else tuple(filter(None, [after.strip().partition("\n")[0]]))
        self._before, self._after = before, after

    def question_prompt(self, beginning: str) -> list[int]:
        """The tokens that a question continues. beginning: its first words; may be empty."""
        return self._tokenizer.encode(self._before + beginning, add_special_tokens=False)

    def answer_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens that the answer to a conversation continues. Raises RequestError if the template refuses."""
        return self._tokenizer.encode(self._render(messages), add_special_tokens=False)

    def question_of(self, prompt: Sequence[int]) -> str:
        """The user's text in the prompt of a conversation of one turn."""
        text = self._tokenizer.decode(prompt, skip_special_tokens=False)
        return text.removeprefix(self._before).removesuffix(self._after)

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self._template.render(
                messages, add_generation_prompt=True, continue_final_message=False, extra={}
            )
        except RequestError as error:
            raise RequestError(f"the model's chat template refuses a conversation: {error}") from None


class QuestionFilter:
    """Remembers what it has let pass. dropped: questions by the reason for which they were dropped."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self.dropped: Counter[str] = Counter()
        self._seen = {_key(each) for each in known}

    def takes(self, text: str, *, ended: bool) -> bool:
        """ended: the model ended the question by itself."""
        reason = self._problem(text, ended)
        if reason:
            self.dropped[reason] += 1
            return False
        self._seen.add(_key(text))
        return True

    def _problem(self, text: str, ended: bool) -> str:
        if not ended:
            return "too long"
        stripped = text.strip()
        if len(stripped) < _MIN_CHARS:
            return "empty"
        if "\ufffd" in stripped:
            return "degenerate"
        if sum(each.isalpha() or each.isspace() for each in stripped) < _MIN_LETTERS * len(stripped):
            return "degenerate"
        words = stripped.lower().split()
        if len(words) >= _LONG and len(set(words)) < _MIN_NEW_WORDS * len(words):
            return "degenerate"
        return "duplicate" if _key(stripped) in self._seen else ""


def _key(text: str) -> str:
    """Equal for questions that differ in case, spaces and signs only."""
    return " ".join(re.findall(r"\w+", text.lower()))


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


def derived_seed(seed: int, use: str, index: int) -> int:
    """A seed of its own, below 2 ** 63, for each use and index."""
    digest = blake2b(f"{seed} {use} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
