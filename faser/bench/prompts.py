"""The prompts that a bench asks: a file's, or built-in questions, as the model's chat template renders them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from faser.api.templates.chat_template import ChatTemplate
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """token_ids: as the model gets them. category: what kind of text it is."""

    token_ids: tuple[int, ...]
    category: str = ""


def read_prompts(path: str | None, tokenizer: Tokenizer, *, limit: int) -> list[Prompt]:
    """Up to `limit` prompts as first turns of chats. path: see questions_of; None: built-in questions.

    Raises ConfigError for a file without prompts, and a model without a chat template.
    """
    source = tokenizer.chat_template
    if not isinstance(source, str):
        raise ConfigError("this model has no chat template, which prompts are put into")
    template = ChatTemplate(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)

    def tokens(text: str) -> tuple[int, ...]:
        rendered = template.render(
            [{"role": "user", "content": text}], add_generation_prompt=True, continue_final_message=False, extra={}
        )
        return tuple(tokenizer.encode(rendered, add_special_tokens=False))

    asked = _built_in() if path is None else questions_of(Path(path))
    return [Prompt(token_ids=tokens(text), category=category) for category, text in spread(asked, limit)]


def questions_of(path: Path) -> list[tuple[str, str]]:
    """(category, text) of a file: JSON lines with "turns" and "category", as of Spec-Bench, or a text a line."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not lines:
            raise ConfigError(f"--prompts is {path}; it holds no prompt")
        if path.suffix != ".jsonl":
            return [("", line) for line in lines]
        records = [json.loads(line) for line in lines]
        return [(record.get("category", ""), record["turns"][0]) for record in records]
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ConfigError(f"--prompts is {path}; it cannot be read: {error!r}") from error


def spread(questions: Sequence[tuple[str, str]], limit: int) -> list[tuple[str, str]]:
    """At most `limit` of them, evenly over the whole, so that no category is left out that a sample can hold."""
    count = min(limit, len(questions))
    return [questions[place * len(questions) // count] for place in range(count)]


def _built_in() -> list[tuple[str, str]]:
    from faser.bench.questions import QUESTIONS

    return [(question.category, question.text) for question in QUESTIONS]
