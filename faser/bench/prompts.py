"""The prompts of a bench: questions from a file or built in, rendered with the model's chat template."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from faser.api.requests.chat_template import ChatTemplate
from faser.bench.questions import QUESTIONS, Question
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPrompt:
    """token_ids: the rendered prompt. category: the kind of its text; empty: unknown."""

    token_ids: tuple[int, ...]
    category: str = ""


def read_prompts(path: str | None, tokenizer: Tokenizer, *, limit: int | None = None) -> list[BenchPrompt]:
    """Prompts, each the first turn of a chat. path: a file for read_questions; None: the built-in questions.

    limit: the most prompts to return; None: all.
    Raises ConfigError for a file without prompts and for a model without a chat template.
    """
    source = tokenizer.chat_template
    if not isinstance(source, str):
        raise ConfigError("this model has no chat template; the prompts of a bench need one")
    template = ChatTemplate(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)

    def token_ids(text: str) -> tuple[int, ...]:
        rendered = template.render(
            [{"role": "user", "content": text}], add_generation_prompt=True, continue_final_message=False, extra={}
        )
        return tuple(tokenizer.encode(rendered, add_special_tokens=False))

    questions = QUESTIONS if path is None else read_questions(Path(path))
    chosen = questions if limit is None else evenly_spaced(questions, limit)
    return [BenchPrompt(token_ids=token_ids(each.text), category=each.category) for each in chosen]


def read_questions(path: Path) -> list[Question]:
    """Questions of a file: JSON lines with "turns" and "category", as in Spec-Bench, or one text per line.

    Raises ConfigError that names the file, and the line that has another form.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"--prompts is {path}; it must be text in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"--prompts is {path}; it cannot be read: {error.strerror}") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"--prompts is {path}; it holds no prompt")
    if path.suffix != ".jsonl":
        return [Question(category="", text=line) for _, line in numbered]
    return [_question(line, f"--prompts is {path}; its line {number}") for number, line in numbered]


def _question(line: str, named: str) -> Question:
    """named: how a message begins."""
    try:
        record = json.loads(line)
        return Question(category=str(record.get("category", "")), text=str(record["turns"][0]))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f'{named} must be JSON such as {{"category": "chat", "turns": ["Hello"]}}') from None


def evenly_spaced(questions: Sequence[Question], limit: int) -> list[Question]:
    """At most `limit` questions, evenly spaced over all; files group questions by category."""
    count = min(limit, len(questions))
    return [questions[place * len(questions) // count] for place in range(count)]


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
