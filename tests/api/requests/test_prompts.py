"""From the prompts of a body to token ids: which are refused, which are cut, in which portions they are read."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import pytest

from faser.api.requests.prompts import (
    LARGE_CHARS,
    TextWorker,
    TokenizationRules,
    TokenizedPrompt,
    tokenize_prompts,
)
from faser.errors import RequestError
from tests.fake_engine import byte_tokenizer

_T = TypeVar("_T")
LIMIT = 4096


class CountingWorker(TextWorker):
    """Works at once, and notes how many characters each piece of work has."""

    def __init__(self) -> None:
        super().__init__()
        self.num_chars: list[int] = []

    async def run(self, num_chars: int, work: Callable[[], _T]) -> _T:
        self.num_chars.append(num_chars)
        return work()


def tokenized(
    sources: list[str | list[int]], *, truncate: int | None = None, worker: TextWorker | None = None
) -> list[TokenizedPrompt]:
    rules = TokenizationRules(limit=LIMIT, add_special_tokens=False, truncate=truncate)
    return asyncio.run(tokenize_prompts(sources, byte_tokenizer(), rules, worker or CountingWorker()))


@pytest.mark.parametrize("prompt", ["x" * (LIMIT + 1), [7] * (LIMIT + 1)])
def test_a_prompt_over_the_context_is_refused_with_its_exact_length_where_that_is_cheap(
    prompt: str | list[int],
) -> None:
    with pytest.raises(RequestError, match=r"length is 4096 tokens. The prompt has 4097 tokens\.$"):
        tokenized([prompt])


def test_a_prompt_far_over_the_context_is_refused_untokenised() -> None:
    with pytest.raises(RequestError, match="The prompt has at least 142858 tokens"):
        tokenized(["x" * 1_000_000])


def test_a_long_text_is_cut_before_it_is_tokenised() -> None:
    text = "".join(f"{number} bottles " for number in range(1_000_000))
    (prompt,) = tokenized([text], truncate=40)
    assert bytes(prompt.token_ids).decode() == text[-40:]
    assert prompt.text == text  # which an echo repeats


@pytest.mark.parametrize("length", [39, 40, 41])
def test_cutting_keeps_the_last_tokens_or_all(length: int) -> None:
    text = "".join(chr(ord("a") + at % 26) for at in range(length))
    (prompt,) = tokenized([text], truncate=40)
    assert bytes(prompt.token_ids).decode() == text[-40:]


def test_prompts_are_read_in_portions_and_a_large_one_alone() -> None:
    worker = CountingWorker()
    part = "x" * (LARGE_CHARS // 4)
    sources: list[str | list[int]] = [*[part] * 9, "y" * 100_000, [1, 2, 3], "z"]
    prompts = tokenized(sources, truncate=5, worker=worker)
    assert [prompt.text for prompt in prompts] == [part] * 9 + ["y" * 100_000, None, "z"]
    assert worker.num_chars == [LARGE_CHARS, LARGE_CHARS, LARGE_CHARS // 4, 100_000, 1]
