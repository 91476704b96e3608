"""Prompts that people wrote, from a file in Spec-Bench's format.

Owns the reading and the order: a seeded shuffle, so that every stretch of the list mixes the categories.
"""

import json
import random
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_SHUFFLE_SEED = 20240401


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The first turn of one question."""

    question_id: int
    category: str
    text: str


def load_prompts(path: Path, categories: Collection[str] = ()) -> tuple[Prompt, ...]:
    """Questions of a JSON-lines file with question_id, category and turns, in an order that never changes.

    categories: of the questions to keep; none given, all.

    Raises ValueError that names the file and the line when one of the fields is missing, or the file when no
    question is left.
    """
    prompts = [
        _prompt_of(line, f"{path}:{number}")
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        if line.strip()
    ]
    random.Random(_SHUFFLE_SEED).shuffle(prompts)
    kept = tuple(prompt for prompt in prompts if not categories or prompt.category in categories)
    if not kept:
        raise ValueError(f"{path} holds no questions" + (f" of {', '.join(categories)}" if categories else ""))
    return kept


def take(prompts: tuple[Prompt, ...], start: int, count: int) -> tuple[Prompt, ...]:
    """count prompts from position start on; after the last one the first one follows."""
    return tuple(prompts[(start + offset) % len(prompts)] for offset in range(count))


def _prompt_of(line: str, where: str) -> Prompt:
    try:
        question = json.loads(line)
        return Prompt(
            question_id=question["question_id"], category=question["category"], text=question["turns"][0]
        )
    except (KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{where} is no question with question_id, category and turns: {error!r}") from error
