"""A real engine for recording and for checks: loaded in this process, stepped by whoever asked for it.

Loads torch with the model, when called. Owns the reading of prompts, too, since only a model's own template makes
tokens of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.simulator.live import LiveEngine
from benchmarks.simulator.record import Recording
from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.engine.checkpoints.source import resolve
from faser.engine.control.timing.cost_model import CostModel
from faser.engine.text.tokenizer import Tokenizer, load_tokenizer
from faser.errors import ConfigError

if TYPE_CHECKING:  # they load torch, which only a call may do
    from benchmarks.simulator.draft_recorder import DraftRecorder
    from faser.engine.execution.drafters.drafter import Drafter

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
        from benchmarks.simulator.draft_recorder import DraftRecorder

        if not self._recorded:
            return drafter
        self._recorder = DraftRecorder(drafter)
        return self._recorder

    def costs(self, costs: CostModel) -> None:
        self.believed = costs

    def recordings(self) -> Sequence[Recording]:
        return () if self._recorder is None else self._recorder.recordings
