"""A real engine for recording and for checks: loaded in this process, stepped by whoever asked for it.

Loads torch with the model, when called. Owns the reading of prompts, too, since only a model's own template makes
tokens of them.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faser.api.chat_template import ChatTemplate
from faser.config import EngineConfig, cache_dir
from faser.engine.cost_model import CostModel
from faser.engine.models.source import resolve
from faser.engine.tokenizer import Tokenizer, load_tokenizer
from faser.errors import ConfigError
from faser.sim.live import LiveEngine
from faser.sim.record import Prompt, Recording

if TYPE_CHECKING:  # they load torch, which only a call may do
    from faser.engine.spec.drafter import Drafter
    from faser.engine.spec.recorder import DraftRecorder

Report = Callable[[str, int, int], None]
Recordings = Callable[[], Sequence[Recording]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RealEngine:
    """An engine, its costs as they are believed now, and the recordings of its drafter (none if not recorded)."""

    engine: LiveEngine
    config: EngineConfig
    tokenizer: Tokenizer
    costs: CostModel
    recordings: Recordings


def open_engine(options: dict[str, Any], report: Report, *, recorded: bool) -> RealEngine:
    """options: fields of EngineConfig. recorded: its drafter is recorded, and never drafts for real.

    Raises ConfigError for what cannot be served, and for a configuration that does not draft, or not greedily.
    """
    from faser.engine.build import build_engine

    config = EngineConfig(**options)
    if config.speculation.policy == "off" or config.speculation.draft_sample_method == "probabilistic":
        raise ConfigError(
            f"the policy is {config.speculation.policy} and drafts are {config.speculation.draft_sample_method}; "
            "a trace needs a drafter, and greedy drafts, whose verdicts do not depend on their length"
        )
    directory = resolve(config.model, cache_dir(), revision=config.revision, progress=report)
    watch = _Watch(recorded=recorded)
    engine, _ = build_engine(config, directory, report, watch)
    assert watch.believed is not None, "an engine that speculates has shown its costs"
    return RealEngine(
        engine=engine,
        config=config,
        tokenizer=load_tokenizer(Path(config.tokenizer or directory)),
        costs=watch.believed,
        recordings=watch.recordings,
    )


class _Watch:
    """Puts a recorder before the engine's drafter, if one is wanted, and keeps sight of the costs."""

    def __init__(self, *, recorded: bool) -> None:
        self._recorded = recorded
        self._recorder: DraftRecorder | None = None
        self.believed: CostModel | None = None

    def drafter(self, drafter: "Drafter") -> "Drafter":
        from faser.engine.spec.recorder import DraftRecorder

        if not self._recorded:
            return drafter
        self._recorder = DraftRecorder(drafter)
        return self._recorder

    def costs(self, costs: CostModel) -> None:
        self.believed = costs

    def recordings(self) -> Sequence[Recording]:
        return () if self._recorder is None else self._recorder.recordings


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
