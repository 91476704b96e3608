"""Early pruning changes no token, flags what ranks low, and learns from what was verified and from nothing else.

Planted bugs that these tests have caught: the rows of the next sequence pruned (an offset of one); the last
flagged token taken for the first; a bonus token that equals the drafted one counted as a rejection; tokens after a
rejection counted as rejected; a threshold by the share instead of its bound.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from faser.config.speculation import SpeculationConfig
from faser.engine.contract.plan import SequenceRows, StepRows
from faser.engine.control.speculation.overlap import OverlapOptions
from faser.engine.control.speculation.policy import Candidates, Policy
from faser.engine.engine import Engine
from faser.engine.execution.pruning import (
    LOOK_EVERY,
    LOOK_OFTEN,
    Action,
    EarlyPruning,
    PreviewRows,
    PruneGate,
    make_early_pruning,
    upper_share,
)
from faser.engine.execution.runner.batch import BlockTable, RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.rows import StepTokens
from faser.errors import ConfigError
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.torch_backend import TorchBackend
from faser.types.answer import SequenceError
from faser.types.arrays import Bools, Ints
from faser.types.request import Request
from faser.types.sampling import SamplingParams
from faser.types.statistics import PruneStats
from tests.checkpoints import VOCAB_SIZE
from tests.engine.execution.pruning_world import (
    CAP,
    NUM_LAYERS,
    ForwardedStep,
    PatientCores,
    RandomGate,
    World,
    answers,
    four_sequences,
    make_engine,
    make_world,
    write_pair,
)
from tests.engine.losslessness import equality

STEP_S = 0.02


class GivenGate(RandomGate):
    """Flags tokens from a given rank on, in steps that all prune or all only look. Remembers what it is taught."""

    def __init__(self, *, least: int = 1, prunes: bool = True) -> None:
        super().__init__(0)
        self._least_rank, self._prunes = least, prunes
        self.lessons: list[tuple[int, bool]] = []

    def decide(self) -> Action:
        return Action.PRUNE if self._prunes else Action.LOOK

    def flags(self, ranks: Ints) -> Bools:
        flagged: Bools = ranks >= self._least_rank
        return flagged

    def learn(self, ranks: Ints, accepted: Bools) -> None:
        self.lessons += zip(ranks.tolist(), accepted.tolist(), strict=True)


def given_ranks(ranks: Sequence[int], gate: PruneGate, layer: int = 2) -> EarlyPruning:
    return EarlyPruning(gate, layer=layer, ranks=lambda _runner, _drafted: np.array(ranks, dtype=np.int64))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def world(pair: tuple[Path, Path], kernel_cache: Path) -> World:
    """On the native kernels, where a row has the same bits whatever its neighbours."""
    return make_world(pair, NativeBackend(library_path(cache_dir=kernel_cache), num_threads=1))


def requests(count: int, **sampling: Any) -> list[Request]:
    """Half of the prompts begin as the one before, so that blocks are shared."""
    rng = np.random.default_rng(8)
    prompts = [rng.integers(3, VOCAB_SIZE, 20 + 3 * i).tolist() for i in range(count)]
    prompts = [prompts[i - 1] + each if i % 2 else each for i, each in enumerate(prompts)]
    return [
        Request(
            request_id=str(i),
            prompt_token_ids=tuple(prompt[:90]),
            sampling=SamplingParams(**{"max_tokens": 40 - i, "seed": i, "ignore_eos": True} | sampling),
            arrival_s=float(i),
        )
        for i, prompt in enumerate(prompts)
    ]


def speculation(**given: Any) -> SpeculationConfig:
    asked: dict[str, Any] = {
        "method": "draft_model",
        "model": "drafter",
        "policy": "fixed",
        "num_speculative_tokens": CAP,
    }
    return SpeculationConfig(**asked | given)


NO_DRAFTS = SpeculationConfig(policy="off")
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "prompt_logprobs": 1},
}


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize(
    "given_config, layer",
    [
        ({}, 0),
        ({"draft_sample_method": "greedy"}, 1),
        ({"method": "auto"}, NUM_LAYERS),
    ],
    ids=["coupled", "greedy", "auto"],
)
@pytest.mark.full(but=("coupled-greedy", "greedy-sampled"))
def test_whatever_is_pruned_tokens_and_log_probabilities_are_those_without_speculation(
    world: World, sampling: str, given_config: dict[str, Any], layer: int
) -> None:
    """Any suffix of any draft leaves; sequences are preempted, prefixes shared."""
    asked = requests(9, **SAMPLING[sampling])
    oracle = make_engine(world, NO_DRAFTS, None)
    expected = answers(oracle, asked)
    assert oracle.stats().num_preemptions > 0, "the pool is meant to be too small"
    pruning = EarlyPruning(RandomGate(1, chance=0.2, look_share=0.3), layer=layer)
    engine = make_engine(world, speculation(**given_config), pruning)
    assert answers(engine, asked) == expected
    assert pruning.stats.pruned_rows > 20
    assert min(pruning.stats.shadow_steps, pruning.stats.verified) > 0
    drafts = engine.stats().speculation
    assert drafts is not None
    assert sum(each.accepted for each in drafts.methods) > 0


@pytest.mark.full
def test_whatever_is_pruned_tokens_are_the_same_on_the_reference_backend(pair: tuple[Path, Path]) -> None:
    """Scores are not, in their last bits: a row's depend on how many others there are."""
    world, asked = make_world(pair, TorchBackend()), requests(5, temperature=0.9)
    pruning = EarlyPruning(RandomGate(1), layer=2)
    found = answers(make_engine(world, speculation(), pruning), asked)
    assert {name: tokens for name, (tokens, _) in found.items()} == {
        name: tokens for name, (tokens, _) in answers(make_engine(world, NO_DRAFTS, None), asked).items()
    }
    assert pruning.stats.pruned_rows > 20


@pytest.mark.parametrize("drafter, least", [({}, 20), ({"method": "suffix", "model": None}, 1)])
def test_tokens_that_another_beats_after_all_layers_are_rejected(
    world: World, drafter: dict[str, Any], least: int
) -> None:
    """There the preview is the logits: at temperature 0 a flag from rank 1 on is never false, misses nothing."""
    asked = requests(6, temperature=0.0)
    pruning = EarlyPruning(GivenGate(), layer=NUM_LAYERS)
    engine = make_engine(world, speculation(**drafter), pruning)
    assert answers(engine, asked) == answers(make_engine(world, NO_DRAFTS, None), asked)
    stats = pruning.stats
    assert stats.pruned_rows > least
    assert stats.false_prunes == 0
    found = engine.stats().speculation
    assert found is not None
    assert stats.flagged == stats.verified - sum(each.accepted for each in found.methods)


OVERLAP = OverlapOptions(name="cores", share=0.5, mode="on", every=1000)
HALF_RIGHT = 0.01  # noise of a drafter whose overlapped drafts often continue accepted ones


@pytest.fixture(scope="module")
def overlapping(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> World:
    """The same on two lanes, so that drafting overlaps, with a better drafter."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two lanes take two cores")
    good = write_pair(tmp_path_factory.mktemp("good"), noise=HALF_RIGHT)
    return make_world(good, NativeBackend(library_path(cache_dir=kernel_cache), num_threads=1), PatientCores())


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("overlap", [None, OVERLAP], ids=["serial", "overlapped"])
@pytest.mark.full(but=("serial-greedy",))
def test_tokens_flagged_at_random_leave_in_steps_with_and_without_overlap_and_change_nothing(
    overlapping: World, sampling: str, overlap: OverlapOptions | None
) -> None:
    asked = requests(6, **SAMPLING[sampling])
    pruning = EarlyPruning(RandomGate(9), layer=3)
    engine = make_engine(overlapping, speculation(), pruning, overlap=overlap)
    assert answers(engine, asked) == answers(make_engine(overlapping, NO_DRAFTS, None), asked)
    found = engine.stats().speculation
    assert found is not None
    modes = dict(found.mode_steps)
    assert modes["serial" if overlap is None else "cores"] > 5 * sum(
        steps for mode, steps in modes.items() if mode not in ("plain", "serial" if overlap is None else "cores")
    )
    assert found.pruning == pruning.stats
    assert pruning.stats.pruned_rows == sum(each.cut for each in found.methods) > 0
    (method,) = [each for each in found.methods if each.drafted]
    assert method.drafted == method.pruned + method.verified
    assert pruning.stats.wasted_rows == method.verified - method.accepted


class Everything(Policy):
    """A policy that drafts all it may, and remembers the survival that it sees for first tokens."""

    name = "everything"
    never_drafts = False

    def __init__(self) -> None:
        self.expected = 0.0

    def lengths(self, candidates: Candidates) -> Ints:
        self.expected = float(candidates.survival[:, 1].mean())
        return candidates.limit


def first_tokens(_runner: Runner, drafted: PreviewRows) -> Ints:
    """Ranks the first token of every draft low."""
    first: Ints = (drafted.depth == 0).astype(np.int64)
    return first


def test_a_flagged_token_that_was_right_is_learned_as_accepted(overlapping: World) -> None:
    """All rows leave, so that no draft has an accepted token; that first ones were right is known all the same."""
    pruning, policy = EarlyPruning(GivenGate(), layer=2, ranks=first_tokens), Everything()
    engine = make_engine(overlapping, speculation(), pruning, policy=policy)
    answers(engine, requests(5, temperature=0.0))
    stats = pruning.stats
    right = stats.false_prunes / stats.verified
    assert stats.flagged == stats.verified > 50
    assert right > 0.4
    assert policy.expected == pytest.approx(right, abs=0.25)
    found = engine.stats().speculation
    assert found is not None
    assert sum(each.verified for each in found.methods) == 0


@pytest.fixture(scope="module")
def step(pair: tuple[Path, Path]) -> ForwardedStep:
    return four_sequences(pair)


@pytest.mark.parametrize(
    "ranks, left",
    [
        ([0, 0, 0, 0, 0], (2, 3)),
        ([5, 0, 0, 0, 0], (0, 3)),
        ([0, 5, 0, 5, 5], (1, 1)),
        ([4, 4, 5, 0, 5], (2, 0)),
    ],
)
def test_the_first_flagged_token_and_all_after_it_leave(
    step: ForwardedStep, ranks: list[int], left: tuple[int, int]
) -> None:
    runner, batch, rows = step
    pruning = given_ranks(ranks, GivenGate(least=5))
    shorter, narrowed = pruning.run(runner, rows, batch)
    assert shorter.num_drafts == [left[0], 0, 0, left[1]]
    first, second, third, last = (each.token_ids for each in rows)
    assert [each.token_ids for each in shorter] == [first[: 1 + left[0]], second, third, last[: 1 + left[1]]]
    assert narrowed.token_ids.tolist() == shorter.token_ids
    assert pruning.stats.pruned_rows == 5 - sum(left)


def test_a_look_alone_prunes_nothing(step: ForwardedStep) -> None:
    runner, batch, rows = step
    pruning = given_ranks([5] * 5, GivenGate(least=0, prunes=False))
    assert pruning.run(runner, rows, batch) == (rows, batch)
    assert (pruning.stats.shadow_steps, pruning.stats.pruned_rows) == (1, 0)


class _NoModel:
    """A runner that runs nothing."""

    _batch: RowBatch

    def begin(self, batch: RowBatch) -> None:
        self._batch = batch

    def advance(self, num_layers: int | None = None) -> None: ...

    def compact(self, counts: NDArray[np.int32]) -> RowBatch:
        return self._batch.compact(counts)[0]


drafts_strategy = st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=4)


@given(drafts_strategy, st.data())
def test_only_verified_tokens_are_learned_from(drafts: list[list[int]], data: st.DataObject) -> None:
    """Oracle: a loop. The bonus token verifies the drafted token after the accepted ones as well."""
    own = [data.draw(st.lists(st.integers(0, 2), min_size=5, max_size=5)) for _ in drafts]
    ranks = [data.draw(st.integers(0, 3)) for draft in drafts for _ in draft]
    pruned_to = [data.draw(st.integers(0, len(draft))) for draft in drafts]
    sampled, expected, at = [], [], 0
    for draft, target, left in zip(drafts, own, pruned_to, strict=True):
        said: list[int] = []
        for depth, token_id in enumerate(draft):
            reached = len(said) == depth and depth <= left and said == draft[:depth]
            if reached:
                said.append(target[depth])
                expected.append((ranks[at], token_id == target[depth]))
            at += 1
        if said == draft and left == len(draft):
            said.append(target[len(draft)])
        sampled.append(tuple(said))
    if not ranks:
        return
    gate = GivenGate(least=9, prunes=False)
    pruning = given_ranks(ranks, gate)
    rows, batch = step_of(drafts)
    pruning.run(_NoModel(), rows, batch)  # type: ignore[arg-type]
    token_ids = [token_id for each in sampled for token_id in each]
    pruning.learn(StepTokens(counts=[*map(len, sampled)], token_ids=token_ids))
    assert gate.lessons == expected


def test_tokens_accepted_before_an_error_are_not_wasted() -> None:
    """Two of three drafted rows; of the other sequence one of two, and the bonus token."""
    pruning = given_ranks([0] * 5, GivenGate(least=9))
    rows, batch = step_of([[1, 1, 1], [2, 2]])
    pruning.run(_NoModel(), rows, batch)  # type: ignore[arg-type]
    pruning.learn(
        StepTokens(counts=[2, 2], token_ids=[1, 1, 2, 0], errors={0: SequenceError.NOT_FINITE}),
    )
    assert pruning.stats.wasted_rows == 2


def step_of(drafts: list[list[int]]) -> tuple[StepRows, RowBatch]:
    table = BlockTable(len(drafts), 1)
    for slot in range(len(drafts)):
        table.append(slot, (slot,))
    rows = tuple(
        SequenceRows(slot=slot, start=0, token_ids=(9, *draft), new_blocks=(), samples=True, num_drafts=len(draft))
        for slot, draft in enumerate(drafts)
    )
    step = StepRows.of(*rows)
    return step, table.gather(step)


def decisions(gate: PruneGate, count: int) -> list[Action]:
    return [gate.decide() for _ in range(count)]


def test_before_anything_is_known_some_steps_look_and_none_prunes() -> None:
    found = decisions(PruneGate(), 100)
    assert [at for at, each in enumerate(found) if each is Action.LOOK] == [*range(0, 100, LOOK_OFTEN)]
    assert Action.PRUNE not in found


def test_once_a_rank_is_too_low_all_steps_prune_but_one_in_twenty() -> None:
    found = decisions(taught(np.full(280, 3), np.zeros(280, dtype=np.bool_)), 100)
    assert [at for at, each in enumerate(found) if each is Action.LOOK] == [*range(0, 100, LOOK_EVERY)]
    assert Action.RUN_WHOLE not in found


def taught(ranks: Ints, accepted: Bools) -> PruneGate:
    gate = PruneGate()
    gate.learn(ranks, accepted)
    return gate


@pytest.mark.parametrize("count, flags", [(250, False), (280, True)])
def test_a_rank_is_too_low_once_266_tokens_of_it_were_rejected(count: int, flags: bool) -> None:
    gate = taught(np.full(count, 3), np.zeros(count, dtype=np.bool_))
    assert gate.flags(np.array([0, 1, 2, 7, 1000])).tolist() == [False, *[flags] * 4]


def test_the_least_rank_is_the_one_from_which_on_few_were_right() -> None:
    """Of ranks 4 to 7 one in ten was right, of 8 to 15 none; a token that nothing beats stays for ever."""
    ranks = np.repeat([0, 5, 12], 1000)
    accepted = np.zeros(3000, dtype=np.bool_)
    accepted[1000:2000:10] = True
    gate = taught(ranks, accepted)
    assert gate.flags(np.array([0, 5, 7, 8, 12, 99])).tolist() == [False] * 3 + [True] * 3


@pytest.mark.parametrize("good, total", [(0, 1000), (20, 1000), (3, 7)])
def test_the_upper_share_is_the_end_of_wilsons_interval(good: float, total: float) -> None:
    """There the share that was seen lies 2.326 standard deviations below."""
    (found,) = upper_share(np.array([good]), np.array([total])).tolist()
    assert found > good / total
    assert (found - good / total) ** 2 == pytest.approx(2.326**2 * found * (1 - found) / total)


def test_nothing_is_known_without_tokens() -> None:
    assert upper_share(np.zeros(1), np.zeros(1)).tolist() == [1.0]


MODEL = {"method": "draft_model", "model": "small"}


@pytest.mark.parametrize(
    "given",
    [
        MODEL,
        {"method": "eagle3", "model": "head"},
        {"method": "auto"},
        {"method": "suffix"},
        MODEL | {"draft_sample_method": "greedy"},
    ],
)
def test_drafts_that_are_point_masses_can_be_pruned(given: dict[str, str]) -> None:
    config = SpeculationConfig(**given)  # type: ignore[arg-type]
    assert make_early_pruning(config, num_layers=4).stats == PruneStats()


@pytest.mark.parametrize(
    "given, why",
    [
        (MODEL | {"draft_sample_method": "probabilistic"}, "drawn"),
        (MODEL | {"rejection_sample_method": "synthetic"}, "synthetic"),
        (MODEL | {"policy": "off"}, "never drafts"),
    ],
)
def test_other_drafts_are_refused_with_the_reason(given: dict[str, str], why: str) -> None:
    config = SpeculationConfig(**given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=why):
        make_early_pruning(config, num_layers=4)


def test_a_target_of_one_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="this one has 1"):
        make_early_pruning(SpeculationConfig(), num_layers=1)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return equality.write_pair(tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter"))


@pytest.mark.parametrize("early_prune", ["off", "on"])
def test_an_engine_looks_only_where_early_pruning_is_on(checkpoints: tuple[Path, Path], early_prune: str) -> None:
    config = {"method": "draft_model", "model": str(checkpoints[1])}
    engine = equality.build(checkpoints, config, early_prune=early_prune, spec_overlap="off")
    engine.use_policy("fixed", equality.CAP)
    assert answers_of(engine) == answers_of(equality.build(checkpoints, None))
    found = engine.stats().speculation
    assert found is not None
    assert (found.pruning is not None) == (early_prune == "on")
    assert found.pruning is None or found.pruning.shadow_steps + found.pruning.pruned_steps > 0


def answers_of(engine: Engine) -> dict[tuple[str, int], equality.Answer]:
    return equality.answers(engine, equality.requests(temperature=0.0, max_tokens=24)[:12])
