"""What a cell is asked: prompts with seeds of their own, the same for every policy.

Knows token ids; where prompts come from and how they are spelled is somebody else's.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from faser.errors import ConfigError
from faser.types import Request, SamplingParams

Prompts = Sequence[tuple[str, tuple[int, ...]]]  # (category, token ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """One prompt to be answered. category: kind of its text, empty if nobody said. seed: of its sampling."""

    token_ids: tuple[int, ...]
    category: str
    seed: int

    def request(self, name: str, *, temperature: float, output_tokens: int, cache_salt: str | None) -> Request:
        """Answers have one length: where they end must not depend on what they say."""
        return Request(
            request_id=name,
            prompt_token_ids=self.token_ids,
            sampling=SamplingParams(
                temperature=temperature, seed=self.seed, max_tokens=output_tokens, ignore_eos=True
            ),
            arrival_s=time.monotonic(),
            cache_salt=cache_salt,
        )


def choose(
    prompts: Prompts, *, categories: Sequence[str], max_prompt_tokens: int | None
) -> list[tuple[str, tuple[int, ...]]]:
    """(category, token ids) of the wanted categories (none: all) that are short enough.

    Raises ConfigError for a category that no prompt has, and where nothing is left.
    """
    present = sorted({category for category, _ in prompts})
    for category in categories:
        if category not in present:
            raise ConfigError(f"--categories names {category!r}; the prompts have {', '.join(present)}")
    limit = max_prompt_tokens if max_prompt_tokens is not None else max(len(ids) for _, ids in prompts)
    left = [
        (category, ids) for category, ids in prompts if len(ids) <= limit and category in (categories or present)
    ]
    if not left:
        shortest = min(len(ids) for _, ids in prompts)
        raise ConfigError(f"--max-prompt-tokens is {limit}; the shortest prompt has {shortest} tokens")
    return left


def jobs_of(prompts: Prompts, count: int) -> list[BenchRequest]:
    """count jobs; beyond the last prompt the first follows, with another seed."""
    return [
        BenchRequest(category=prompts[i % len(prompts)][0], token_ids=prompts[i % len(prompts)][1], seed=i)
        for i in range(count)
    ]
