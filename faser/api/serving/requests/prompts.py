"""Prompts as token ids. Long texts are tokenised in a thread; texts that cannot fit are refused beforehand."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from faser.engine.text.tokenizer import Tokenizer
from faser.errors import RequestError

_T = TypeVar("_T")

# Below this, tokenising takes less time than handing it to a thread.
_INLINE_CHARS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedPrompt:
    """text: as the client sent it; None if the client sent token ids."""

    text: str | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizationRules:
    """How a request's prompts become token ids.

    limit: the context length, in tokens. truncate: how many of the last tokens to keep; None keeps all.
    field: the field of the body that the prompts come from.
    """

    limit: int
    add_special_tokens: bool
    field: str = "prompt"
    truncate: int | None = None

    def __post_init__(self) -> None:
        if self.truncate is not None and not 1 <= self.truncate <= self.limit:
            raise RequestError(
                f"truncate_prompt_tokens is {self.truncate}; it must be -1, or from 1 to {self.limit}",
                param="truncate_prompt_tokens",
            )


async def in_thread_if_long(num_chars: int, work: Callable[[], _T]) -> _T:
    """The result of work on a text. num_chars: its length; long texts are worked on in a thread."""
    return work() if num_chars <= _INLINE_CHARS else await asyncio.to_thread(work)


async def tokenize_prompts(
    sources: Sequence[str | list[int]], tokenizer: Tokenizer, rules: TokenizationRules
) -> list[TokenizedPrompt]:
    """One prompt per source. Raises RequestError for a prompt that is empty or certainly too long."""
    num_chars = sum(len(source) for source in sources if isinstance(source, str))
    return await in_thread_if_long(num_chars, lambda: [_tokenize(source, tokenizer, rules) for source in sources])


def _tokenize(source: str | list[int], tokenizer: Tokenizer, rules: TokenizationRules) -> TokenizedPrompt:
    if not isinstance(source, str):
        _check_length(len(source), f"{len(source)}", rules)
        return TokenizedPrompt(text=None, token_ids=_kept(source, rules))
    lower_bound = tokenizer.min_tokens(source)
    _check_length(lower_bound, f"at least {lower_bound}", rules)
    token_ids = tokenizer.encode(source, add_special_tokens=rules.add_special_tokens)
    if not token_ids:
        raise RequestError(
            "the prompt is empty: it has 0 tokens, special tokens included; it must have at least 1",
            param=rules.field,
        )
    return TokenizedPrompt(text=source, token_ids=_kept(token_ids, rules))


def _check_length(num_tokens: int, shown: str, rules: TokenizationRules) -> None:
    """Refuse a prompt that is too long before working on it; the engine checks max_tokens as well."""
    if rules.truncate is None and num_tokens > rules.limit:
        raise RequestError(
            f"This model's maximum context length is {rules.limit} tokens. The prompt has {shown} tokens.",
            param=rules.field,
        )


def _kept(token_ids: list[int], rules: TokenizationRules) -> tuple[int, ...]:
    return tuple(token_ids) if rules.truncate is None else tuple(token_ids[-rules.truncate :])
