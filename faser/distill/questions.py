"""Questions for a model to answer, which the model asks itself: it continues its chat template in the user's turn.

A model that was trained on whole conversations continues a prompt that ends where the user's turn begins with a
question of its own. Of four questions two begin as the model likes, one with first words that spread them over
kinds of tasks, and one is about an earlier answer: it follows that conversation, or has the answer as a document.
The first words are ours and name no subject: that is the model's to choose. QuestionFilter drops what is not worth
an answer. Knows no torch; an AnswerSource computes.

Source: Xu et al. (Magpie), arXiv:2406.08464.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

from faser.api.requests.chat_template import ChatTemplate
from faser.distill.dataset import Dataset, RecordedConversation
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import ConfigError, ModelError, RequestError
from faser.types.sampling import SamplingParams

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
_ABOUT_DOCUMENTS = (
    "{}\n\nSummarize this text.",
    "{}\n\nUsing only the text above, answer:",
    "{}\n\n",
    "Read this:\n\n{}\n\nQuestion:",
    "Summarize the following text in two sentences:\n\n{}",
    "Rewrite the following in simple words:\n\n{}",
    "Translate this into another language:\n\n{}",
    "List what the following text says, point by point:\n\n{}",
    "Correct and improve:\n\n{}",
    "Here are my notes:\n\n{}\n\nPlease",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Continuation of one prompt. token_ids: with the end token, if there is one. ended: no limit cut it off."""

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
        self._between = self._between_turns()

    @property
    def has_history(self) -> bool:
        """Return whether the template takes a question that follows an answer."""
        return bool(self._between)

    def question_prompt(self, beginning: str, history: Sequence[Message] = ()) -> list[int]:
        """The tokens that a question continues.

        beginning: its first words; may be empty. history: the messages before it.
        """
        asked = self._render([*history, {"role": "user", "content": _MARK}]).partition(_MARK)[0]
        return self._tokenizer.encode(asked + beginning, add_special_tokens=False)

    def answer_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens that the answer to a conversation continues. Raises RequestError if the template refuses."""
        return self._tokenizer.encode(self._render(messages), add_special_tokens=False)

    def question_of(self, prompt: Sequence[int]) -> str:
        """The user's last text in the prompt of a conversation."""
        text = self._tokenizer.decode(prompt, skip_special_tokens=False).removesuffix(self._after)
        found = text.rpartition(self._between)[2] if self._between else text
        return found.removeprefix(self._before)

    def first_turn(self, conversation: RecordedConversation) -> list[Message] | None:
        """A question and its answer, if the conversation has no turns before and its answer ended by itself."""
        prompt = self._tokenizer.decode(conversation.prompt, skip_special_tokens=False)
        if not conversation.ended or (self._between and self._between in prompt):
            return None
        return [
            {"role": "user", "content": self.question_of(conversation.prompt)},
            {"role": "assistant", "content": self._tokenizer.decode(conversation.answer)},
        ]

    def _between_turns(self) -> str:
        """Return the template's text between an answer and the next question; empty: it takes one turn only."""
        answer, question = _MARK + "answer", _MARK + "next"
        roles = (("user", _MARK), ("assistant", answer), ("user", question))
        try:
            text = self._render([{"role": role, "content": content} for role, content in roles])
        except RequestError:
            return ""
        return text.partition(answer)[2].partition(question)[0]

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
        self._seen: set[str] = set()
        self.add(known)

    def add(self, known: Iterable[str]) -> None:
        self._seen.update(map(_key, known))

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
    """Sampling of questions. per_shard: before the filter. max_tokens: longer questions are dropped."""

    seed: int = 0
    per_shard: int = 256
    temperature: float = 1.0
    top_p: float = 0.95
    max_tokens: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opening:
    """Beginning of a question: the messages before it, and its first words."""

    history: Sequence[Message] = ()
    words: str = ""


class SelfAskedQuestions:
    """Questions of one model, none twice."""

    def __init__(self, source: AnswerSource, turns: ChatTurns, settings: AskingSettings) -> None:
        self._source = source
        self._turns = turns
        self._settings = settings
        self._filter = QuestionFilter()
        self._earlier: list[list[Message]] = []  # first turns of the conversations that there are
        self._shards_read = 0

    def next_batch(self, dataset: Dataset, on_question: Callable[[], None]) -> QuestionBatch:
        """Raises ConfigError if hardly any question can be used."""
        self._read(dataset)
        settings, known = self._settings, self._filter
        known.dropped.clear()
        indices = range(dataset.asked, dataset.asked + settings.per_shard)
        openings = [self._opening(index) for index in indices]
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
        prompts = [self._turns.question_prompt(each.words, each.history) for each in openings]
        found = self._source.answer(prompts, sampling, lambda _tokens: on_question())
        texts = [(opening.words + each.text).strip() for opening, each in zip(openings, found, strict=True)]
        conversations = [
            [*opening.history, {"role": "user", "content": text}]
            for opening, text, each in zip(openings, texts, found, strict=True)
            if known.takes(text, ended=each.ended)
        ]
        dropped = dict(sorted(known.dropped.items()))
        if len(conversations) < max(1, _MIN_KEPT * len(texts)):
            raise ConfigError(
                f"of {len(texts)} questions that the model asked itself {len(conversations)} can be used "
                f"(dropped: {dropped}); "
                "it was not trained on what users say: give questions with --prompts, or recorded text with "
                "--from-traffic"
            )
        return QuestionBatch(conversations=conversations, asked=len(texts), dropped=dropped)

    def _read(self, dataset: Dataset) -> None:
        """Learn which questions and answers there are."""
        for index in range(self._shards_read, len(dataset.records)):
            shard = list(dataset.shard(index))
            self._filter.add(self._turns.question_of(each.prompt) for each in shard)
            self._earlier += filter(None, map(self._turns.first_turn, shard))
        self._shards_read = len(dataset.records)

    def _opening(self, index: int) -> _Opening:
        if index % 2 == 0:
            return _Opening()
        draw = derived_seed(self._settings.seed, "beginning", index)
        if index % 4 == 1 or not self._earlier:
            return _Opening(words=_BEGINNINGS[draw % len(_BEGINNINGS)])
        turn = self._earlier[derived_seed(self._settings.seed, "earlier", index) % len(self._earlier)]
        if index % 8 == 3 and self._turns.has_history:
            return _Opening(history=turn)
        return _Opening(words=_ABOUT_DOCUMENTS[draw % len(_ABOUT_DOCUMENTS)].format(turn[1]["content"]))


def derived_seed(seed: int, use: str, index: int) -> int:
    """A seed of its own, below 2 ** 63, for each use and index."""
    digest = blake2b(f"{seed} {use} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
