"""Whether an engine has early pruning, and how its parts are put together."""

from faser.config.speculation import SpeculationConfig
from faser.engine.contract.step_times import CostTable
from faser.engine.execution.pruning.early_pruning import EarlyPruning
from faser.engine.execution.pruning.gate import MODES, OFF, ON, PruneGate
from faser.engine.execution.pruning.rank_judge import NUM_TOP, RankJudge
from faser.engine.execution.pruning.step_seconds import StepSeconds
from faser.errors import ConfigError


def make_early_pruning(
    mode: str, config: SpeculationConfig, step_table: CostTable, *, num_layers: int, num_slots: int
) -> EarlyPruning | None:
    """None where the engine never prunes. step_table: measured seconds of target steps. num_layers: of the target.

    Raises ConfigError as can_prune does, and for a target of one layer.
    """
    if not can_prune(mode, config):
        return None
    step_seconds = StepSeconds(step_table)
    gate = PruneGate(mode, num_layers=num_layers, num_top=NUM_TOP, step_seconds=step_seconds)
    return EarlyPruning(gate, RankJudge(), step_seconds, num_slots=num_slots)


def can_prune(mode: str, config: SpeculationConfig) -> bool:
    """Whether an engine with this configuration has early pruning at all.

    Raises ConfigError for an unknown mode, and for `on` where drafts cannot be pruned exactly or usefully.
    """
    if mode not in MODES:
        raise ConfigError(f"early pruning is {mode!r}; it must be one of {', '.join(MODES)}")
    obstacle = _obstacle(config)
    if mode == ON and obstacle is not None:
        raise ConfigError(f"early pruning cannot be on: {obstacle}")
    return mode != OFF and obstacle is None


def _obstacle(config: SpeculationConfig) -> str | None:
    if config.policy == "off":
        return "policy off never drafts"
    if config.synthetic:
        return "synthetic rejection accepts drafts without looking at them"
    if not config.needs_passes:
        return f"drafts of method {config.method} come from text alone, which names no other likely tokens"
    if config.draft_sample_method == "probabilistic":
        return "drafts that are drawn (draft_sample_method probabilistic) are verified with their probabilities"
    return None
