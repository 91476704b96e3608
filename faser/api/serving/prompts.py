"""Text to prompt token ids, without holding up other requests and without reading what cannot fit."""

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
class Prompt:
    """text: as it was sent, or None if token ids were."""

    text: str | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRules:
    """How a request's prompts become token ids.

    limit: of the context, in tokens. truncate: how many tokens to keep, counted from the end; None keeps all.
    field: of the body, the one a prompt comes from.
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


async def in_background(chars: int, work: Callable[[], _T]) -> _T:
    """The result of work on so many characters: in a thread if they are many."""
    return work() if chars <= _INLINE_CHARS else await asyncio.to_thread(work)


async def read_prompts_tokens(
    sources: Sequence[str | list[int]], tokenizer: Tokenizer, rules: PromptRules
) -> list[Prompt]:
    """One prompt a source. Raises RequestError if one is empty or certainly too long."""
    chars = sum(len(source) for source in sources if isinstance(source, str))
    return await in_background(chars, lambda: [_tokenise(source, tokenizer, rules) for source in sources])


def _tokenise(source: str | list[int], tokenizer: Tokenizer, rules: PromptRules) -> Prompt:
    if not isinstance(source, str):
        _check_length(len(source), f"{len(source)}", rules)
        return Prompt(text=None, token_ids=_kept(source, rules))
    least = tokenizer.min_tokens(source)
    _check_length(least, f"at least {least}", rules)
    token_ids = tokenizer.encode(source, add_special_tokens=rules.add_special_tokens)
    if not token_ids:
        raise RequestError(
            "the prompt is empty: it has 0 tokens, and no token is put before it; it must have at least 1",
            param=rules.field,
        )
    return Prompt(text=source, token_ids=_kept(token_ids, rules))


def _check_length(num_tokens: int, shown: str, rules: PromptRules) -> None:
    """Refuse what is too long before any more work is done on it; the engine checks the rest."""
    if rules.truncate is None and num_tokens > rules.limit:
        raise RequestError(
            f"This model's maximum context length is {rules.limit} tokens. The prompt has {shown} tokens.",
            param=rules.field,
        )


def _kept(token_ids: list[int], rules: PromptRules) -> tuple[int, ...]:
    return tuple(token_ids) if rules.truncate is None else tuple(token_ids[-rules.truncate :])
