"""Texts as token ids: prompts and predictions.

What cannot fit is refused, and what is to be truncated cut, before it is tokenised. No text holds up other
requests: TextWorker works on a short one at once, on a longer one in a thread. Tokenising takes some 200 bytes of
memory for each character, so large texts share one thread: only one of them needs that much at a time, and what it
needed goes back to the system.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from faser.api.bodies.fields import Prediction
from faser.api.requests.template_sandbox import TooSlowError, short_time
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import RequestError
from faser.machine import return_free_memory

_T = TypeVar("_T")
# A text, token ids, or a pair of texts for a cross-encoder.
Source = str | list[int] | tuple[str, str]
_INLINE_CHARS = 2048  # handing work to a thread takes longer than tokenising so little
_INLINE_SECONDS = 0.05  # of a processor, for a chat template: the event loop waits as long
LARGE_CHARS = 1 << 15  # more of them are a large text


class TextWorker:
    """Worker for tokenizing and templates, one for each server. Call it from an event loop."""

    def __init__(self) -> None:
        self._works_inline = True  # until a chat template has been slow
        self._one_by_one = ThreadPoolExecutor(max_workers=1, thread_name_prefix="faser-large-texts")

    async def run(self, num_chars: int, work: Callable[[], _T]) -> _T:
        """The result of work on texts of num_chars characters together. Raises what work raises."""
        if num_chars <= _INLINE_CHARS and self._works_inline:
            with suppress(TooSlowError), short_time(_INLINE_SECONDS):
                return work()
            self._works_inline = False
        if num_chars <= LARGE_CHARS:
            return await asyncio.to_thread(work)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._one_by_one, partial(_work_and_return_memory, work))


def _work_and_return_memory(work: Callable[[], _T]) -> _T:
    try:
        return work()
    finally:
        return_free_memory()


def count_chars(values: Iterable[Any]) -> int:
    """Characters of all strings in JSON values, and one for each value. Stops counting where the text is large."""
    found = 0
    waiting = list(values)
    while waiting and found <= LARGE_CHARS:
        value = waiting.pop()
        found += 1
        if isinstance(value, str):
            found += len(value)
        elif isinstance(value, dict):
            waiting += value.keys()
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedPrompt:
    """text: as the client sent it; None if the client sent token ids. tail: as Request.prompt_tail.

    second_from: of a pair, as Pooling.second_from.
    """

    text: str | None
    token_ids: tuple[int, ...]
    tail: int | None = None
    second_from: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizationRules:
    """Rules for turning a request's prompts into token ids.

    limit: the context length, in tokens. truncate: how many of the last tokens to keep; None keeps all.
    keeps_start: of the first tokens instead.
    field: the field of the body that the prompts come from.
    """

    limit: int
    add_special_tokens: bool
    field: str = "prompt"
    truncate: int | None = None
    keeps_start: bool = False

    def __post_init__(self) -> None:
        if self.truncate is not None and not 1 <= self.truncate <= self.limit:
            raise RequestError(
                f"truncate_prompt_tokens is {self.truncate}; it must be -1, or from 1 to {self.limit}",
                param="truncate_prompt_tokens",
            )


async def tokenize_prompts(
    sources: Sequence[Source], tokenizer: Tokenizer, rules: TokenizationRules, worker: TextWorker
) -> list[TokenizedPrompt]:
    """One prompt per source. Raises RequestError for a prompt that is empty or too long."""
    prompts: list[TokenizedPrompt] = []
    for num_chars, group in _groups(sources):
        prompts += await worker.run(num_chars, partial(tokenize_all, group, tokenizer, rules))
    return prompts


def _groups(sources: Sequence[Source]) -> Iterator[tuple[int, list[Source]]]:
    """(number of characters, sources) in order. A group with more than one text is not large."""
    group: list[Source] = []
    num_chars = 0
    for source in sources:
        length = sum(len(each) for each in _texts(source))
        if group and num_chars + length > LARGE_CHARS:
            yield num_chars, group
            group, num_chars = [], 0
        group.append(source)
        num_chars += length
    yield num_chars, group


def _texts(source: Source) -> tuple[str, ...]:
    """Return the texts of a source, of which token ids have none."""
    if isinstance(source, tuple):
        return source
    return (source,) if isinstance(source, str) else ()


def tokenize_all(
    sources: Sequence[Source], tokenizer: Tokenizer, rules: TokenizationRules
) -> list[TokenizedPrompt]:
    """Tokenise in this thread, as tokenize_prompts does."""
    return [_tokenize(source, tokenizer, rules) for source in sources]


def _tokenize(source: Source, tokenizer: Tokenizer, rules: TokenizationRules) -> TokenizedPrompt:
    if isinstance(source, tuple):
        return _tokenize_pair(*source, tokenizer, rules)
    if not isinstance(source, str):
        return TokenizedPrompt(text=None, token_ids=_kept(source, rules))
    if rules.truncate is not None:
        part_of = tokenizer.start_of if rules.keeps_start else tokenizer.end_of
        text = part_of(source, rules.truncate)
    else:
        text = source
        _refuse(excess(text, tokenizer, rules.limit), rules)
    most = rules.truncate if rules.keeps_start else None
    token_ids = encode(text, tokenizer, field=rules.field, add_special_tokens=rules.add_special_tokens, most=most)
    if not token_ids:
        raise RequestError(
            "the prompt is empty: it has 0 tokens, special tokens included; it must have at least 1",
            param=rules.field,
        )
    return TokenizedPrompt(text=source, token_ids=_kept(token_ids, rules))


def _kept(token_ids: list[int], rules: TokenizationRules) -> tuple[int, ...]:
    """The prompt's tokens. Raises RequestError for more than the context; the engine checks max_tokens as well."""
    if rules.truncate is not None:
        return tuple(token_ids[: rules.truncate] if rules.keeps_start else token_ids[-rules.truncate :])
    _refuse(f"{len(token_ids)} tokens" if len(token_ids) > rules.limit else None, rules)
    return tuple(token_ids)


def _refuse(size: str | None, rules: TokenizationRules) -> None:
    if size is not None:
        raise RequestError(
            f"This model's maximum context length is {rules.limit} tokens. The prompt has {size}.",
            param=rules.field,
        )


async def read_prediction(
    given: Prediction | None, tokenizer: Tokenizer, worker: TextWorker, *, limit: int
) -> tuple[int, ...] | None:
    """Token ids of the prediction; None: the body has none. limit: the context length, in tokens.

    Raises RequestError for a prediction longer than the limit, as no answer can be.
    """
    if given is None:
        return None
    text = given.content if isinstance(given.content, str) else "".join(part.text for part in given.content)
    return await worker.run(len(text), lambda: _tokenize_prediction(text, tokenizer, limit))


def _tokenize_prediction(text: str, tokenizer: Tokenizer, limit: int) -> tuple[int, ...]:
    size = excess(text, tokenizer, limit)
    if size is None:
        token_ids = encode(text, tokenizer, field="prediction", add_special_tokens=False)
        if len(token_ids) <= limit:
            return tuple(token_ids)
        size = f"{len(token_ids)} tokens"
    raise RequestError(
        f"prediction has {size}; it must not exceed the model's context, {limit} tokens", param="prediction"
    )


def _tokenize_pair(first: str, second: str, tokenizer: Tokenizer, rules: TokenizationRules) -> TokenizedPrompt:
    if rules.truncate is None:
        for text in (first, second):
            _refuse(excess(text, tokenizer, rules.limit), rules)
    else:
        first, second = (tokenizer.start_of(each, rules.truncate) for each in (first, second))
    try:
        token_ids, second_from = tokenizer.encode_pair(first, second, most=rules.truncate)
    except RequestError as error:
        raise RequestError(str(error), param=rules.field) from None
    return TokenizedPrompt(text=None, token_ids=_kept(token_ids, rules), second_from=second_from)


def encode(
    text: str, tokenizer: Tokenizer, *, field: str, add_special_tokens: bool, most: int | None = None
) -> list[int]:
    """Return the token ids of a text; most: as in Tokenizer.encode.

    Raises RequestError whose param is field for a text that is not Unicode.
    """
    try:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens, most=most)
    except RequestError as error:
        raise RequestError(str(error), param=field) from None


def excess(text: str, tokenizer: Tokenizer, limit: int) -> str | None:
    """The size, in words, of a text too long to be tokenised for a limit of tokens; None: it may fit."""
    num_tokens = tokenizer.min_tokens(text)
    if num_tokens > limit:
        return f"at least {num_tokens} tokens"
    most = tokenizer.max_chars(limit)
    return f"{len(text)} characters, and at most {most} are read as {limit} tokens" if len(text) > most else None
