"""Chooses prompts of a bench: evenly over all, or by category and length."""

from collections.abc import Sequence
from typing import TypeVar

from faser.cli.bench.prompts import BenchPrompt
from faser.errors import ConfigError

Item = TypeVar("Item")


def evenly_spaced(items: Sequence[Item], limit: int) -> list[Item]:
    """At most `limit` items, evenly spaced over all; files group questions by category."""
    count = min(limit, len(items))
    return [items[place * len(items) // count] for place in range(count)]


def select_prompts(
    prompts: Sequence[BenchPrompt], *, categories: Sequence[str], max_prompt_tokens: int | None
) -> list[BenchPrompt]:
    """The prompts of these categories (empty: all) with at most max_prompt_tokens tokens.

    Raises ConfigError for a category that no prompt has, and if no prompt remains.
    """
    present = sorted({each.category for each in prompts})
    for category in categories:
        if category not in present:
            raise ConfigError(f"--categories names {category!r}; the prompts have {', '.join(present)}")
    lengths = [len(each.token_ids) for each in prompts]
    limit = max(lengths) if max_prompt_tokens is None else max_prompt_tokens
    chosen = categories or present
    selected = [each for each in prompts if len(each.token_ids) <= limit and each.category in chosen]
    if not selected:
        raise ConfigError(f"--max-prompt-tokens is {limit}; the shortest prompt has {min(lengths)} tokens")
    return selected
