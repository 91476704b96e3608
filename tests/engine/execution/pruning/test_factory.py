"""Which engines have early pruning, why others cannot, and how a running engine switches it off and on again."""

from pathlib import Path

import pytest

from faser.config.speculation import SpeculationConfig
from faser.engine.build import Built
from faser.engine.contract.step_times import CostTable
from faser.engine.engine import Engine
from faser.engine.execution.pruning.early_pruning import EarlyPruning
from faser.engine.execution.pruning.factory import can_prune, make_early_pruning
from faser.engine.execution.pruning.gate import MODES
from faser.errors import ConfigError
from tests.engine.losslessness.equality import CAP, Answer, answers, build, build_with_parts, requests, write_pair

TABLE = CostTable(rows=(1,), seconds=(0.01,))

MODEL = {"method": "draft_model", "model": "small"}


@pytest.mark.parametrize(
    "given",
    [
        MODEL,
        {"method": "auto", "model": "small"},
        MODEL | {"draft_sample_method": "greedy"},
    ],
)
def test_drafts_of_a_model_that_are_point_masses_can_be_pruned(given: dict[str, str]) -> None:
    config = SpeculationConfig(**given)  # type: ignore[arg-type]
    assert [can_prune(mode, config) for mode in MODES] == [True, True, False]


@pytest.mark.parametrize(
    "given, why",
    [
        ({"method": "ngram"}, "from text alone"),
        ({"method": "suffix"}, "from text alone"),
        ({"method": "auto"}, "from text alone"),
        (MODEL | {"draft_sample_method": "probabilistic"}, "drawn"),
        (MODEL | {"rejection_sample_method": "synthetic"}, "synthetic"),
        (MODEL | {"policy": "off"}, "never drafts"),
    ],
)
def test_other_drafts_are_not_pruned_and_on_says_why(given: dict[str, str], why: str) -> None:
    config = SpeculationConfig(**given)  # type: ignore[arg-type]
    assert not can_prune("auto", config)
    assert not can_prune("off", config)
    with pytest.raises(ConfigError, match=why):
        can_prune("on", config)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="'always'; it must be one of auto, on, off"):
        can_prune("always", SpeculationConfig())


@pytest.mark.parametrize("mode, made", [("auto", True), ("on", True), ("off", False)])
def test_early_pruning_is_made_where_it_can_prune(mode: str, made: bool) -> None:
    config = SpeculationConfig(**MODEL)  # type: ignore[arg-type]
    found = make_early_pruning(mode, config, TABLE, num_layers=4, num_slots=2)
    assert isinstance(found, EarlyPruning) is made


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter"))


def drafting(checkpoints: tuple[Path, Path], early_prune: str) -> Built:
    given = {"method": "draft_model", "model": str(checkpoints[1])}
    return build_with_parts(checkpoints, given, early_prune=early_prune, spec_overlap="off")


def answers_of(engine: Engine) -> dict[tuple[str, int], Answer]:
    return answers(engine, requests(temperature=0.0, max_tokens=24)[:12])


def test_an_engine_whose_early_pruning_is_off_has_none(checkpoints: tuple[Path, Path]) -> None:
    built = drafting(checkpoints, "off")
    built.engine.use_policy("fixed", CAP)
    answers_of(built.engine)
    speculation = built.engine.stats().speculation
    assert speculation is not None
    assert (built.pruning, speculation.pruning) == (None, None)


def test_a_running_engine_stops_looking_and_begins_again_and_says_the_same(checkpoints: tuple[Path, Path]) -> None:
    built, expected = drafting(checkpoints, "on"), answers_of(build(checkpoints, None))
    engine, pruning = built.engine, built.pruning
    assert pruning is not None
    engine.use_policy("fixed", CAP)
    pruning.use("off")
    assert answers_of(engine) == expected
    assert num_looked_at(engine) == 0
    pruning.use(None)  # as built
    assert answers_of(engine) == expected
    looked_at_before = num_looked_at(engine)
    assert looked_at_before > 0
    engine.use_policy("faser")
    pruning.use("off")
    assert answers_of(engine) == expected
    assert num_looked_at(engine) == looked_at_before


def num_looked_at(engine: Engine) -> int:
    """Steps in which drafted tokens were looked at before the last layer."""
    speculation = engine.stats().speculation
    assert speculation is not None
    assert speculation.pruning is not None
    return speculation.pruning.shadow_steps + speculation.pruning.pruned_steps
