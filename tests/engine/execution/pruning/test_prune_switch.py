"""Early pruning is switched while the engine runs: off is off at once, and nothing of what was learned is lost."""

from pathlib import Path

import pytest

from faser.engine.contract.step_times import StepTimes
from faser.engine.control.timing.cost_model import CostModel
from faser.engine.engine import Engine
from faser.engine.execution.pruning.gate import UNSPLIT, PruneGate
from faser.errors import ConfigError
from faser.types import PruneStats
from tests.engine.losslessness.equality import CAP, Answer, answers, build, requests, write_pair

STEPS = 2000  # more than the longest time between two shadow looks


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter"))


def gate_of(mode: str) -> PruneGate:
    costs = CostModel(StepTimes.proportional(step_s=0.01, pass_s=1e-5, text_s=1e-7))
    return PruneGate(mode, num_layers=12, most=8, costs=costs)


def looks(gate: PruneGate) -> int:
    return sum(gate.ask(16, 12, named=True) != UNSPLIT for _ in range(STEPS))


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_gate_that_is_off_never_looks_and_needs_no_likely_tokens(mode: str) -> None:
    gate = gate_of(mode)
    assert looks(gate) > 0
    gate.use("off")
    assert looks(gate) == 0
    assert not gate.may_look()


@pytest.mark.parametrize("mode", ["auto", "on", None])
def test_a_gate_looks_again_when_it_may(mode: str | None) -> None:
    gate = gate_of("auto")
    gate.use("off")
    looks(gate)
    gate.use(mode)
    assert looks(gate) > 0


def test_a_mode_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'sometimes'.*auto, on, off"):
        gate_of("auto").use("sometimes")


def test_an_engine_without_early_pruning_can_only_leave_it_off(checkpoints: tuple[Path, Path]) -> None:
    engine = drafting(checkpoints, "off")
    engine.use_policy("fixed", CAP, early_prune="off")
    with pytest.raises(ConfigError, match="early_prune is on; this engine was built without early pruning"):
        engine.use_policy("fixed", CAP, early_prune="on")


def test_a_running_engine_stops_looking_and_begins_again_and_says_the_same(checkpoints: tuple[Path, Path]) -> None:
    engine, expected = drafting(checkpoints, "on"), said(build(checkpoints, None))
    engine.use_policy("fixed", CAP, early_prune="off")
    assert said(engine) == expected
    assert looked(engine) == 0
    engine.use_policy("fixed", CAP)  # as built
    assert said(engine) == expected
    looked_before = looked(engine)
    assert looked_before > 0
    engine.use_policy("faser", early_prune="off")
    assert said(engine) == expected
    assert looked(engine) == looked_before


def drafting(checkpoints: tuple[Path, Path], early_prune: str) -> Engine:
    given = {"method": "draft_model", "model": str(checkpoints[1])}
    return build(checkpoints, given, early_prune=early_prune, spec_overlap="off")


def said(engine: Engine) -> dict[tuple[str, int], Answer]:
    return answers(engine, requests(temperature=0.0, max_tokens=24)[:12])


def looked(engine: Engine) -> int:
    """Steps in which drafts were looked at before the last layer."""
    speculation = engine.stats().speculation
    assert speculation is not None
    pruning = speculation.pruning or PruneStats()
    return pruning.shadow_steps + pruning.pruned_steps
