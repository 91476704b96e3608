"""RealEngine: an engine loaded in this process, for recording and for checks; the caller runs its steps.

Imports torch only when it loads a model. Has the model's tokenizer, which makes tokens of the prompts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.simulator.live import LiveEngine
from benchmarks.simulator.record import RecordedSequence
from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.engine.checkpoints.source import resolve
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.step_cost import CostModel
from faser.engine.text.tokenizer import Tokenizer, load_tokenizer
from faser.errors import ConfigError

Report = Callable[[str, int, int], None]
Recordings = Callable[[], Sequence[RecordedSequence]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RealEngine:
    """An engine, its cost model, and what its drafter proposed (nothing if it is not recorded).

    step_times: as measured; costs: corrected by the engine as it goes.
    """

    engine: LiveEngine
    config: EngineConfig
    tokenizer: Tokenizer
    step_times: StepTimes
    costs: CostModel
    recordings: Recordings


def open_engine(options: dict[str, Any], report: Report, *, recorded: bool) -> RealEngine:
    """options: fields of EngineConfig. recorded: its drafter is recorded, and never drafts for real.

    Raises ConfigError for what cannot be served, and for a configuration that does not draft, or not greedily.
    """
    from benchmarks.simulator.draft_recorder import DraftRecorder, make_recorder
    from faser.engine.build import build
    from faser.engine.execution.drafting.drafter import Drafter

    config = EngineConfig(**options)
    if config.speculation.policy == "off" or config.speculation.draft_sample_method == "probabilistic":
        raise ConfigError(
            f"the policy is {config.speculation.policy} and drafts are {config.speculation.draft_sample_method}; "
            "a trace needs a drafter, and greedy drafts, whose verdicts do not depend on their length"
        )
    directory = resolve(config.model, cache_dir(), revision=config.revision, progress=report)
    recorders: list[DraftRecorder] = []

    def recorder_of(drafter: Drafter) -> Drafter:
        if not recorded:
            return drafter
        recorders.append(make_recorder(drafter, config.speculation, num_slots=config.max_num_seqs))
        return recorders[0]

    built = build(config, directory, report, wrap_drafter=recorder_of)
    assert built.costs is not None, "an engine that speculates has a cost model"
    return RealEngine(
        engine=built.engine,
        config=config,
        tokenizer=load_tokenizer(Path(config.tokenizer or directory)),
        step_times=StepTimes(tables=built.costs.tables, interference=built.interference),
        costs=built.costs,
        recordings=lambda: recorders[0].recordings if recorders else (),
    )
