"""Prompts of a bench are sampled and selected."""

import pytest

from benchmarks.spec_bench.prompts import evenly_spaced, select_prompts
from faser.cli.bench.prompts import BenchPrompt
from faser.errors import ConfigError

PROMPTS = [BenchPrompt(category="code", token_ids=(1, 2, 3)), BenchPrompt(category="chat", token_ids=(4, 5))]


def test_a_sample_of_prompts_spreads_over_all() -> None:
    questions = [(each, number) for each in "abc" for number in range(4)]
    assert [each for each, _ in evenly_spaced(questions, 3)] == ["a", "b", "c"]
    assert evenly_spaced(questions, 100) == questions


def test_prompts_are_selected_by_category_and_length() -> None:
    assert select_prompts(PROMPTS, categories=["chat"], max_prompt_tokens=None) == [PROMPTS[1]]
    assert select_prompts(PROMPTS, categories=[], max_prompt_tokens=2) == [PROMPTS[1]]
    assert select_prompts(PROMPTS, categories=[], max_prompt_tokens=None) == PROMPTS


def test_a_selection_without_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match="'poems'; the prompts have chat, code"):
        select_prompts(PROMPTS, categories=["poems"], max_prompt_tokens=None)
    with pytest.raises(ConfigError, match="--max-prompt-tokens is 1; the shortest prompt has 2 tokens"):
        select_prompts(PROMPTS, categories=[], max_prompt_tokens=1)
