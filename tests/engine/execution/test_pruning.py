"""Early pruning changes no token, flags what ranks low, and learns from what was verified and from nothing else.

The gate's oracle is a hand-made staircase of step times.

Planted bugs that these tests have caught: the rows of the next sequence pruned (an offset of one); the last
flagged token taken for the first; a bonus token that equals the drafted one counted as a rejection; tokens after a
rejection counted as rejected; the saving of all layers instead of those after the look; false prunes for free;
hysteresis without its lower edge; a threshold by the share instead of its bound.
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
from faser.engine.build import Built
from faser.engine.contract.plan import SequenceRows, StepRows
from faser.engine.contract.step_times import CostTable
from faser.engine.control.speculation.overlap import OverlapOptions
from faser.engine.control.speculation.policy import Candidates, Policy
from faser.engine.engine import Engine
from faser.engine.execution.pruning import (
    LOOK_EVERY,
    LOOK_OFTEN,
    MODES,
    Action,
    Bools,
    EarlyPruning,
    Ints,
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
from faser.types import PruneStats, Request, SamplingParams, SequenceError
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
        self.leaving: list[int] = []
        self.lessons: list[tuple[int, bool]] = []
        self.num_tokens = 0

    def decide(self, num_rows: int, num_drafts: int) -> Action:
        del num_rows, num_drafts
        return Action.PRUNE if self._prunes else Action.LOOK

    def flags(self, ranks: Ints) -> Bools:
        flagged: Bools = ranks >= self._least_rank
        return flagged

    def looked(self, num_drafts: int, num_leaving: int, seconds: float) -> None:
        del seconds
        assert 0 <= num_leaving <= num_drafts
        self.leaving.append(num_leaving)

    def learn(self, ranks: Ints, accepted: Bools, num_tokens: int) -> None:
        self.lessons += zip(ranks.tolist(), accepted.tolist(), strict=True)
        self.num_tokens += num_tokens


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
    gate = GivenGate(least=5)
    shorter, narrowed = given_ranks(ranks, gate).run(runner, rows, batch)
    assert shorter.num_drafts == [left[0], 0, 0, left[1]]
    first, second, third, last = (each.token_ids for each in rows)
    assert [each.token_ids for each in shorter] == [first[: 1 + left[0]], second, third, last[: 1 + left[1]]]
    assert narrowed.token_ids.tolist() == shorter.token_ids
    assert gate.leaving == [5 - sum(left)]


def test_a_look_alone_prunes_nothing(step: ForwardedStep) -> None:
    runner, batch, rows = step
    gate = GivenGate(least=0, prunes=False)
    pruning = given_ranks([5] * 5, gate)
    assert pruning.run(runner, rows, batch) == (rows, batch)
    assert gate.leaving == [5]
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
    assert gate.num_tokens == sum(map(len, sampled))


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


def test_a_cut_saves_the_layers_after_the_look() -> None:
    """Of 8 rows 3 leave after a quarter of the layers; a step takes 1 s and 0.1 s for each row."""
    steps = CostTable(rows=(1, 2), seconds=(1.1, 1.2))
    gate = PruneGate("on", steps, max_rows=8, share_after=0.75)
    assert gate.saving_s(8, 3) == pytest.approx(0.225)
    assert gate.saving_s(8, 0.5) == pytest.approx(0.0375)


def flat() -> CostTable:
    """Bound by memory: rows cost nothing."""
    return CostTable(rows=(1,), seconds=(STEP_S,))


def rising() -> CostTable:
    """Bound by arithmetic: a step takes as long as its rows."""
    return CostTable(rows=(1, 2), seconds=(STEP_S / 64, STEP_S / 32))


def stairs() -> CostTable:
    """An edge between 40 and 41 rows, and none below."""
    return CostTable(rows=(1, 40, 41, 64), seconds=(0.01, 0.01, 0.02, 0.02))


def gate_of(steps: CostTable, *, mode: str = "auto") -> PruneGate:
    return PruneGate(mode, steps, max_rows=64, share_after=10 / 12)


def teach(gate: PruneGate, *, share: float, look_s: float = 1e-4, tokens: int = 32) -> None:
    """As if looks had found that this share of drafted rows can leave."""
    for _ in range(30):
        gate.looked(100, round(100 * share), look_s)
    gate.learn(np.full(1000, 9), np.zeros(1000, dtype=np.bool_), tokens)
    for _ in range(50):
        gate.learn(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.bool_), tokens)


def decisions(gate: PruneGate, *, steps: int = 60) -> list[Action]:
    """Of steps with 64 rows, 48 of them drafted; every look is taken in."""
    found = []
    for _ in range(steps):
        found.append(gate.decide(64, 48))
        if found[-1] is Action.LOOK:
            gate.looked(48, 0, 1e-4)
    return found


def looks(found: list[Action]) -> list[int]:
    return [i for i, each in enumerate(found) if each is Action.LOOK]


@pytest.mark.parametrize("mode, steps, every", [("auto", rising, LOOK_EVERY), ("on", flat, LOOK_OFTEN)])
def test_before_anything_is_known_some_steps_look_and_none_prunes(mode: str, steps: Any, every: int) -> None:
    found = decisions(gate_of(steps(), mode=mode), steps=100)
    assert looks(found) == [*range(0, 100, every)]
    assert Action.PRUNE not in found


def test_where_rows_cost_nothing_looks_are_rare_and_nothing_prunes() -> None:
    gate = gate_of(flat())
    teach(gate, share=0.5)
    found = decisions(gate, steps=1000)
    assert len(looks(found)) <= 2
    assert Action.PRUNE not in found


def test_where_a_look_costs_more_than_the_best_pruning_saves_looks_are_rare() -> None:
    gate = gate_of(rising())
    teach(gate, share=0.3, look_s=STEP_S)
    assert len(looks(decisions(gate, steps=500))) == 0
    assert not gate.active


def test_where_rows_cost_rows_leave() -> None:
    gate = gate_of(rising())
    teach(gate, share=0.3)
    found = decisions(gate, steps=65)
    assert gate.active
    assert found[-1] is Action.PRUNE
    assert len(looks(found)) == 3


def test_the_gain_is_what_the_rows_cost_in_the_layers_after_the_look_less_look_and_false_prunes() -> None:
    """14.4 of 64 rows leave 10 of 12 layers; up to 5.4 in 1005 of them were right, a step has 32 tokens."""
    gate = gate_of(rising())
    teach(gate, share=0.3)
    for _ in range(300):
        gate.decide(64, 48)
    bound_of_1000 = 2.326**2 / (1000 + 2.326**2)
    expected = 14.4 / 64 * 10 / 12 - 1e-4 / STEP_S - 14.4 * bound_of_1000 / 32
    assert gate.gain == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("share, active", [(0.55, True), (0.2, False)])
def test_rows_that_cross_no_edge_save_nothing(share: float, active: bool) -> None:
    """48 rows of 64 drafted: half of them crosses the edge at 40, a fifth does not."""
    gate = gate_of(stairs())
    teach(gate, share=share)
    for _ in range(60):
        gate.decide(64, 48)
    assert gate.active is active


@pytest.mark.parametrize("tokens, active", [(64, True), (1, False)])
def test_false_prunes_are_paid_for(tokens: int, active: bool) -> None:
    """The same rows, worth more: where a step has few tokens, each of them is worth much of its time."""
    gate = gate_of(CostTable(rows=(1, 64), seconds=(STEP_S / 1.2, STEP_S)))
    teach(gate, share=0.3, tokens=tokens, look_s=1e-5)
    for _ in range(60):
        gate.decide(64, 48)
    assert gate.active is active


def test_pruning_goes_on_until_it_loses() -> None:
    gate = gate_of(rising())
    teach(gate, share=0.3)
    decisions(gate)
    assert gate.active
    for _ in range(60):
        gate.looked(48, 1, 1e-4)
    for _ in range(20):
        gate.decide(64, 48)
    assert gate.active, "a gain that shrinks is a gain"
    for _ in range(60):
        gate.looked(48, 0, 1e-3)
    for _ in range(100):
        gate.decide(64, 48)
    assert not gate.active


def taught(ranks: Ints, accepted: Bools) -> PruneGate:
    gate = gate_of(flat())
    gate.learn(ranks, accepted, 1)
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
    found = [make_early_pruning(mode, config, flat(), num_layers=4, max_rows=8) for mode in MODES]
    assert [each is not None for each in found] == [True, True, False]


@pytest.mark.parametrize(
    "given, why",
    [
        (MODEL | {"draft_sample_method": "probabilistic"}, "drawn"),
        (MODEL | {"rejection_sample_method": "synthetic"}, "synthetic"),
        (MODEL | {"policy": "off"}, "never drafts"),
    ],
)
def test_other_drafts_are_not_pruned_and_on_says_why(given: dict[str, str], why: str) -> None:
    config = SpeculationConfig(**given)  # type: ignore[arg-type]
    assert make_early_pruning("auto", config, flat(), num_layers=4, max_rows=8) is None
    with pytest.raises(ConfigError, match=why):
        make_early_pruning("on", config, flat(), num_layers=4, max_rows=8)


@pytest.mark.parametrize(
    "mode, num_layers, why", [("always", 4, "must be one of auto, on, off"), ("on", 1, "this one has 1")]
)
def test_a_mode_or_a_target_that_does_not_fit_is_refused(mode: str, num_layers: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make_early_pruning(mode, SpeculationConfig(), flat(), num_layers=num_layers, max_rows=8)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return equality.write_pair(tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter"))


def drafting(checkpoints: tuple[Path, Path], early_prune: str) -> Built:
    config = {"method": "draft_model", "model": str(checkpoints[1])}
    return equality.build_with_parts(checkpoints, config, early_prune=early_prune, spec_overlap="off")


def answers_of(engine: Engine) -> dict[tuple[str, int], equality.Answer]:
    return equality.answers(engine, equality.requests(temperature=0.0, max_tokens=24)[:12])


def test_an_engine_whose_early_pruning_is_off_has_none(checkpoints: tuple[Path, Path]) -> None:
    built = drafting(checkpoints, "off")
    built.engine.use_policy("fixed", equality.CAP)
    answers_of(built.engine)
    found = built.engine.stats().speculation
    assert found is not None
    assert (built.pruning, found.pruning) == (None, None)


def test_a_running_engine_stops_looking_and_begins_again_and_says_the_same(checkpoints: tuple[Path, Path]) -> None:
    built, expected = drafting(checkpoints, "on"), answers_of(equality.build(checkpoints, None))
    engine, pruning = built.engine, built.pruning
    assert pruning is not None
    engine.use_policy("fixed", equality.CAP)
    pruning.use("off")
    assert answers_of(engine) == expected
    assert num_looks(pruning.stats) == 0
    pruning.use(None)  # as built
    assert answers_of(engine) == expected
    looked_before = num_looks(pruning.stats)
    assert looked_before > 0
    engine.use_policy("faser")
    pruning.use("off")
    assert answers_of(engine) == expected
    assert num_looks(pruning.stats) == looked_before


def num_looks(stats: PruneStats) -> int:
    return stats.shadow_steps + stats.pruned_steps
