"""Early pruning changes no token, flags what ranks low, and learns from what was judged and from nothing else.

Planted bugs that these tests have caught: a count that includes the drafted token's own column; the rows of the
next sequence pruned (an offset of one); the last flagged token taken for the first; a bonus token that equals the
drafted one counted as a refusal; tokens after a refusal counted as refused; the likely tokens of another draft's
tokens; a border token that is not skipped; likely tokens of overlapped steps that are forgotten, or named in every
step; pruned rows that still count as verified, and a false prune as refused.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.speculation.selected_drafter import SelectedDrafter
from faser.config.speculation import SpeculationConfig
from faser.engine.contract.interference import InterferenceTable
from faser.engine.contract.plan import Draft, DraftPlan, DraftRequest, SequenceRows, SequenceStart
from faser.engine.contract.step_times import CostTable
from faser.engine.control.speculation.overlap.control import OverlapOptions
from faser.engine.control.speculation.policies.policy import Candidates, Policy
from faser.engine.execution.drafter_registry import DrafterParts, DraftModelParts, make_drafter
from faser.engine.execution.drafters.draft_kv_cache import DraftKvCache
from faser.engine.execution.drafters.drafter import NO_TOP, Continuation, Drafter, Proposals
from faser.engine.execution.pruning.early_pruning import EarlyPruning
from faser.engine.execution.pruning.gate import Floats, Ints, Lesson, Look, Split
from faser.engine.execution.pruning.rank_judge import UNKNOWN, DraftedTokens, RankJudge
from faser.engine.execution.pruning.step_seconds import StepSeconds
from faser.engine.execution.runner.batch import BlockTable, RowBatch
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.state import SamplingState
from faser.engine.execution.text_lookup.lookup import CombinedLookup
from faser.engine.execution.text_lookup.text_and_model import TextAndModel
from faser.engine.execution.verifiers.verifier import AcceptanceResult
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.torch.backend import TorchBackend
from faser.types import Request, SamplingParams
from tests.checkpoints import VOCAB_SIZE
from tests.engine.execution.pruning.pruning_world import (
    BLOCK_SIZE,
    CAP,
    MAX_LEN,
    NUM_BLOCKS,
    NUM_LAYERS,
    NUM_SLOTS,
    ForwardedStep,
    PatientCores,
    World,
    answers,
    four_sequences,
    make_engine,
    make_pruning,
    make_runner,
    make_world,
    write_pair,
)

MOST = 8  # beating tokens that a made-up judge reports


class RandomGate:
    """Stops anywhere, with any thresholds, and prunes more often than not. Remembers looks and lessons."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.looks: list[Look] = []
        self.lessons: list[Lesson] = []
        self.num_tokens = 0

    def use(self, mode: str | None) -> None: ...

    def may_look(self) -> bool:
        return True

    def ask(self, num_rows: int, num_drafts: int, *, named: bool) -> Split:
        assert 0 < num_drafts < num_rows
        if not named:
            return Split()
        if self._rng.random() < 0.2:
            return Split()
        if self._rng.random() < 0.3:
            return Split(layers=((0, 1), (1, 3), (2, NUM_LAYERS)))
        layer = int(self._rng.integers(0, NUM_LAYERS + 1))
        return Split(layers=((layer, layer),), prunes=True)

    def thresholds(self, _layer: int, temperatures: Floats) -> Ints:
        return self._rng.integers(0, 3 * MOST, len(temperatures))

    def looked(self, look: Look) -> None:
        assert 0 <= look.flagged_rows <= look.num_drafts
        self.looks.append(look)

    def learn(self, lessons: list[Lesson], num_tokens: int) -> None:
        self.lessons += lessons
        self.num_tokens += num_tokens


class RandomJudge:
    """Random counts."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def counts(self, _runner: Runner, drafted: DraftedTokens) -> Ints:
        return self._rng.integers(UNKNOWN, MOST + 1, len(drafted.depth))


class GivenGate(RandomGate):
    """One layer, one threshold, always."""

    def __init__(self, *, threshold: int, layer: int = 2, prunes: bool = True) -> None:
        super().__init__(0)
        self._threshold, self._split = threshold, Split(layers=((0, layer),), prunes=prunes)

    def ask(self, num_rows: int, num_drafts: int, *, named: bool) -> Split:
        del num_rows, num_drafts
        return self._split if named else Split()

    def thresholds(self, _layer: int, temperatures: Floats) -> Ints:
        return np.full(len(temperatures), self._threshold)


class GivenJudge:
    def __init__(self, counts: list[int]) -> None:
        self._counts = np.array(counts)

    def counts(self, _runner: Runner, _drafted: DraftedTokens) -> Ints:
        return self._counts


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


OFF = SpeculationConfig(policy="off")
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "prompt_logprobs": 1},
}


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize(
    "given_config",
    [{}, {"draft_sample_method": "greedy"}, {"method": "layer_skip", "draft_layers": 4}, {"method": "auto"}],
    ids=["coupled", "greedy", "layer_skip", "auto"],
)
def test_whatever_is_pruned_tokens_and_log_probabilities_are_those_without_speculation(
    world: World, sampling: str, given_config: dict[str, Any]
) -> None:
    """Any suffix of any draft leaves, at any layer; sequences are preempted, prefixes shared."""
    asked = requests(9, **SAMPLING[sampling])
    oracle = make_engine(world, OFF, None)
    expected = answers(oracle, asked)
    assert oracle.stats().num_preemptions > 0, "the pool is meant to be too small"
    gate = RandomGate(1)
    pruning = make_pruning(gate, RandomJudge(2))
    engine = make_engine(world, speculation(**given_config), pruning)
    assert answers(engine, asked) == expected
    assert pruning.stats.pruned_rows > 20
    assert pruning.stats.shadow_steps > 0
    assert sum(len(each.counts) for each in gate.lessons) == pruning.stats.judged > 0
    drafts = engine.stats().speculation
    assert drafts is not None
    assert sum(each.accepted for each in drafts.methods) > 0


@pytest.mark.full
def test_whatever_is_pruned_tokens_are_the_same_on_the_reference_backend(pair: tuple[Path, Path]) -> None:
    """Scores are not, in their last bits: a row's depend on how many others there are."""
    world, asked = make_world(pair, TorchBackend()), requests(5, temperature=0.9)
    pruning = make_pruning(RandomGate(1), RandomJudge(2))
    found = answers(make_engine(world, speculation(), pruning), asked)
    assert {name: tokens for name, (tokens, _) in found.items()} == {
        name: tokens for name, (tokens, _) in answers(make_engine(world, OFF, None), asked).items()
    }
    assert pruning.stats.pruned_rows > 20


def test_a_judge_that_ranks_prunes_what_would_be_refused(world: World) -> None:
    """After all layers the preview is the logits: with a threshold of 1 at temperature 0 no flag is false."""
    asked = requests(6, temperature=0.0)
    pruning = make_pruning(GivenGate(threshold=1, layer=NUM_LAYERS), RankJudge())
    engine = make_engine(world, speculation(), pruning)
    assert answers(engine, asked) == answers(make_engine(world, OFF, None), asked)
    stats = pruning.stats
    assert stats.pruned_rows > 20
    assert stats.false_prunes == 0
    found = engine.stats().speculation
    assert found is not None
    refused = stats.judged - sum(each.accepted for each in found.methods)
    assert stats.flagged > 0.8 * refused, "the drafter names nearly all that beats its tokens"


class SeldomGate(RandomGate):
    """Wants likely tokens for one draft in three, and prunes by them."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._drafts = 0
        self.wanted: list[bool] = []
        self.named: list[bool] = []

    def may_look(self) -> bool:
        self._drafts += 1
        self.wanted.append(self._drafts % 3 == 0)
        return self.wanted[-1]

    def ask(self, num_rows: int, num_drafts: int, *, named: bool) -> Split:
        self.named.append(named)
        return super().ask(num_rows, num_drafts, named=named)


def test_likely_tokens_are_named_for_the_steps_that_may_be_looked_at_and_for_no_other(world: World) -> None:
    gate = SeldomGate(4)
    pruning = make_pruning(gate, RandomJudge(2))
    asked = requests(4, temperature=0.0)
    answers(make_engine(world, speculation(), pruning), asked)
    assert gate.named == gate.wanted
    assert pruning.stats.shadow_steps + pruning.stats.pruned_steps > 0


LANES = InterferenceTable.constant(share=0.5, verify=1.0, draft=1.0, verify_alone=1.0, draft_alone=1.0)
OVERLAP = OverlapOptions(name="cores", lanes=(LANES,), mode="on", every=1000)
HALF_RIGHT = 0.01  # noise of a drafter whose overlapped drafts often continue accepted ones


@pytest.fixture(scope="module")
def overlapping(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> World:
    """The same on two lanes, so that drafting overlaps, with a better drafter."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two lanes take two cores")
    good = write_pair(tmp_path_factory.mktemp("good"), noise=HALF_RIGHT)
    return make_world(good, NativeBackend(library_path(cache_dir=kernel_cache), num_threads=1), PatientCores())


class CoinJudge:
    """Flags about every third token, whatever it is, and remembers each token with its likely tokens."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(9)
        self.looked_at: list[tuple[int, tuple[int, ...]]] = []

    def counts(self, _runner: Runner, drafted: DraftedTokens) -> Ints:
        pairs = zip(drafted.token_ids.tolist(), drafted.top_ids.tolist(), strict=True)
        self.looked_at += [(token_id, tuple(top_ids)) for token_id, top_ids in pairs]
        return (self._rng.random(len(drafted.depth)) < 0.3).astype(np.int64)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("overlap", [None, OVERLAP], ids=["serial", "overlapped"])
def test_tokens_flagged_at_random_leave_in_steps_with_and_without_overlap_and_change_nothing(
    overlapping: World, sampling: str, overlap: OverlapOptions | None
) -> None:
    asked = requests(6, **SAMPLING[sampling])
    judge = CoinJudge()
    pruning = make_pruning(GivenGate(threshold=1, layer=3), judge)
    engine = make_engine(overlapping, speculation(), pruning, overlap=overlap)
    assert answers(engine, asked) == answers(make_engine(overlapping, OFF, None), asked)
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
    (layer,) = pruning.stats.layers
    assert layer.wasted == method.verified - method.accepted
    assert (layer.rows, layer.layer) == (pruning.stats.pruned_rows, 3)


@pytest.mark.parametrize("overlap", [None, OVERLAP], ids=["serial", "overlapped"])
def test_a_drafted_token_is_compared_with_the_likely_tokens_of_its_own_place(
    overlapping: World, overlap: OverlapOptions | None
) -> None:
    """At temperature 0 a drafted token is the likeliest at its place, and rarely at another."""
    judge = CoinJudge()
    pruning = make_pruning(GivenGate(threshold=2), judge)
    answers(make_engine(overlapping, speculation(), pruning, overlap=overlap), requests(4, temperature=0.0))
    assert len(judge.looked_at) > 30
    assert all(token_id == top_ids[0] for token_id, top_ids in judge.looked_at)


class FirstJudge:
    """Flags the first token of every draft."""

    def counts(self, _runner: Runner, drafted: DraftedTokens) -> Ints:
        first: Ints = (drafted.depth == 0).astype(np.int64)
        return first


class Everything(Policy):
    """A policy that drafts all it may, and remembers the survival that it sees for first tokens."""

    name = "everything"
    never_drafts = False

    def __init__(self) -> None:
        self.expected = 0.0

    def lengths(self, candidates: Candidates) -> Ints:
        self.expected = float(candidates.survival[:, 1].mean())
        return candidates.limit


def test_a_flagged_token_that_was_right_is_learned_as_accepted(overlapping: World) -> None:
    """All rows leave, so that no draft has an accepted token; that first ones were right is known all the same."""
    pruning, policy = make_pruning(GivenGate(threshold=1), FirstJudge()), Everything()
    engine = make_engine(overlapping, speculation(), pruning, policy=policy)
    answers(engine, requests(5, temperature=0.0))
    (layer,) = pruning.stats.layers
    right = layer.false_prunes / layer.judged
    assert layer.flagged == layer.judged > 50
    assert right > 0.4
    assert policy.expected == pytest.approx(right, abs=0.25)
    found = engine.stats().speculation
    assert found is not None
    assert sum(each.verified for each in found.methods) == 0


@pytest.fixture(scope="module")
def step(pair: tuple[Path, Path]) -> ForwardedStep:
    return four_sequences(pair)


@pytest.mark.parametrize(
    "counts, left",
    [
        ([0, 0, 0, 0, 0], (2, 3)),
        ([5, 0, 0, 0, 0], (0, 3)),
        ([0, 5, 0, 5, 5], (1, 1)),
        ([4, 4, 5, 0, 5], (2, 0)),
        ([UNKNOWN, 5, 0, 0, 5], (1, 2)),
    ],
)
def test_the_first_flagged_token_and_all_after_it_leave(
    step: ForwardedStep, counts: list[int], left: tuple[int, int]
) -> None:
    runner, batch, rows = step
    gate = GivenGate(threshold=5)
    pruning = make_pruning(gate, GivenJudge(counts))
    top_ids = torch.zeros((5, 1), dtype=torch.int64)
    shorter, narrowed = pruning.run(runner, rows, batch, top_ids)
    assert tuple(each.num_drafts for each in shorter) == (left[0], 0, 0, left[1])
    assert [each.token_ids for each in shorter] == [
        rows[0].token_ids[: 1 + left[0]],
        rows[1].token_ids,
        rows[2].token_ids,
        rows[3].token_ids[: 1 + left[1]],
    ]
    assert narrowed.token_ids.tolist() == [token for each in shorter for token in each.token_ids]
    assert [look.flagged_rows for look in gate.looks] == [5 - sum(left)]


def test_a_shadow_look_prunes_nothing(step: ForwardedStep) -> None:
    runner, batch, rows = step
    gate = GivenGate(threshold=0, prunes=False)
    pruning = make_pruning(gate, GivenJudge([5] * 5))
    assert pruning.run(runner, rows, batch, torch.zeros((5, 1), dtype=torch.int64)) == (rows, batch)
    assert [look.flagged_rows for look in gate.looks] == [5]
    assert (pruning.stats.shadow_steps, pruning.stats.pruned_rows) == (1, 0)


def test_drafts_that_name_no_other_tokens_go_through_whole(step: ForwardedStep) -> None:
    runner, batch, rows = step
    gate = GivenGate(threshold=0)
    pruning = make_pruning(gate, GivenJudge([5] * 5))
    assert pruning.run(runner, rows, batch, None) == (rows, batch)
    assert gate.looks == []


drafts_strategy = st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=4)


@given(drafts_strategy, st.data())
def test_only_verified_tokens_are_learned_from(drafts: list[list[int]], data: st.DataObject) -> None:
    """Oracle: a loop. The bonus token judges the drafted token after the accepted ones as well."""
    own = [data.draw(st.lists(st.integers(0, 2), min_size=5, max_size=5)) for _ in drafts]
    counts = [data.draw(st.integers(UNKNOWN, 3)) for draft in drafts for _ in draft]
    pruned_to = [data.draw(st.integers(0, len(draft))) for draft in drafts]
    came, expected, at = [], [], 0
    for draft, target, left in zip(drafts, own, pruned_to, strict=True):
        said: list[int] = []
        for depth, token_id in enumerate(draft):
            reached = len(said) == depth and depth <= left and said == draft[:depth]
            if reached:
                said.append(target[depth])
                if counts[at] != UNKNOWN:
                    expected.append((counts[at], token_id == target[depth]))
            at += 1
        if said == draft and left == len(draft):
            said.append(target[len(draft)])
        came.append(tuple(said))
    gate = GivenGate(threshold=9, prunes=False)
    pruning = make_pruning(gate, GivenJudge(counts))
    rows, batch = step_of(drafts)
    if not counts:
        return
    pruning.run(_NoModel(), rows, batch, torch.zeros((len(counts), 1), dtype=torch.int64))  # type: ignore[arg-type]
    pruning.learn(rows, acceptance_of(came), overlapped=False)
    (lesson,) = gate.lessons
    assert list(zip(lesson.counts.tolist(), lesson.accepted.tolist(), strict=True)) == expected
    assert gate.num_tokens == sum(map(len, came))


def acceptance_of(came: Sequence[tuple[int, ...]]) -> dict[int, AcceptanceResult]:
    return {slot: AcceptanceResult(token_ids=token_ids) for slot, token_ids in enumerate(came) if token_ids}


class _NoModel:
    """A runner that runs nothing, in 8 layers."""

    num_layers = 8
    _batch: RowBatch

    def begin(self, batch: RowBatch) -> None:
        self._batch = batch

    def advance(self, num_layers: int | None = None) -> None: ...

    def forward(self, batch: RowBatch) -> None: ...

    def compact(self, counts: NDArray[np.int32]) -> RowBatch:
        return self._batch.compact(counts)[0]


def step_of(drafts: list[list[int]]) -> tuple[tuple[SequenceRows, ...], RowBatch]:
    table = BlockTable(len(drafts), 1)
    for slot in range(len(drafts)):
        table.append(slot, (slot,))
    rows = tuple(
        SequenceRows(slot=slot, start=0, token_ids=(9, *draft), new_blocks=(), samples=True, num_drafts=len(draft))
        for slot, draft in enumerate(drafts)
    )
    return rows, table.gather(rows)


def test_verified_tokens_are_learned_with_the_temperature_of_their_request() -> None:
    rows, batch = step_of([[1], [1], [1]])
    gate = GivenGate(threshold=9, prunes=False)
    pruning = make_pruning(gate, GivenJudge([0, 1, 2]), num_slots=3)
    for slot, temperature in enumerate((0.0, 0.3, 1.1)):
        pruning.start(
            SequenceStart(
                slot=slot,
                sampling=SamplingParams(temperature=temperature),
                seed=0,
                prompt_len=1,
                token_ids=(9,),
            )
        )
    pruning.run(_NoModel(), rows, batch, torch.zeros((3, 1), dtype=torch.int64))  # type: ignore[arg-type]
    pruning.learn(rows, acceptance_of([(1, 2), (2,), ()]), overlapped=False)
    (lesson,) = gate.lessons
    assert lesson.temperatures.tolist() == [0.0, 0.3]
    assert lesson.accepted.tolist() == [True, False]


def test_a_cut_saves_the_layers_after_the_look() -> None:
    """Of 8 rows 3 leave after a quarter of the layers; a step takes 1 s and 0.1 s for each row."""
    table = CostTable(rows=(1, 2), seconds=(1.1, 1.2))
    rows, batch = step_of([[1, 1, 1], [0, 0, 0]])
    judge = GivenJudge([0, 0, 9, 0, 9, 0])
    pruning = EarlyPruning(GivenGate(threshold=5), judge, StepSeconds(table), num_slots=2)
    shorter, _ = pruning.run(_NoModel(), rows, batch, torch.zeros((6, 1), dtype=torch.int64))  # type: ignore[arg-type]
    assert [each.num_drafts for each in shorter] == [2, 1]
    assert pruning.saved_s == pytest.approx(0.225)
    pruning.run(_NoModel(), rows, batch, None)  # type: ignore[arg-type]
    assert pruning.saved_s == 0.0


@pytest.mark.parametrize("overlapped", [False, True])
def test_step_times_follow_steps_that_ran_alone(overlapped: bool) -> None:
    """Running nothing is faster than any table says."""
    rows, batch = step_of([[1, 1]])
    seconds = StepSeconds(CostTable(rows=(1,), seconds=(10.0,)))
    pruning = EarlyPruning(GivenGate(threshold=5), GivenJudge([]), seconds, num_slots=1)
    pruning.run(_NoModel(), rows, batch, None)  # type: ignore[arg-type]
    pruning.learn(rows, acceptance_of([(1, 2)]), overlapped=overlapped)
    assert seconds.factor == (1.0 if overlapped else pytest.approx(0.9 + 0.1 / 3))


class TextDrafter:
    """Proposes the same for every sequence, and names no other tokens."""

    drafts_overlapped = True

    def start(self, start: SequenceStart) -> None: ...

    def propose(self, plan: DraftPlan, _until: Callable[[], bool] | None = None, /) -> Proposals:
        return Proposals(
            drafts=tuple(
                Draft(
                    slot=each.slot,
                    method="ngram",
                    token_ids=(7, 8)[: each.max_tokens],
                    confidences=(5.0, 5.0)[: each.max_tokens],
                )
                for each in plan.requests
            )
        )

    def commit(self, continuations: Sequence[Continuation]) -> None: ...

    def release(self, slot: int) -> None: ...


PROMPTS = tuple(tuple(np.random.default_rng(i).integers(3, VOCAB_SIZE, 9 + 5 * i).tolist()) for i in range(4))
LENGTHS = (3, 5, 1, 4)


def model_drafter(pair: tuple[Path, Path], num_top: int) -> Drafter:
    """Its slots have started with PROMPTS, which lie in blocks of their own."""
    table = BlockTable(NUM_SLOTS, 4)
    runner = make_runner(pair[1], TorchBackend())
    model = DraftModelParts(
        runner=runner, kv=DraftKvCache(table, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE), max_positions=MAX_LEN
    )
    parts = DrafterParts(
        target=runner, table=table, sampling=SamplingState(NUM_SLOTS), max_rows=20, model=model, num_top=num_top
    )
    drafter = make_drafter(speculation(draft_sample_method="greedy"), parts)
    for slot, prompt in enumerate(PROMPTS):
        table.append(slot, (3 * slot, 3 * slot + 1, 3 * slot + 2))
        drafter.start(start_of(slot, prompt))
    return drafter


def start_of(slot: int, prompt: tuple[int, ...]) -> SequenceStart:
    return SequenceStart(
        slot=slot, sampling=SamplingParams(temperature=0.0), seed=0, prompt_len=len(prompt), token_ids=prompt
    )


def drafting_plan(slots: Sequence[int], *, wants_top_ids: bool = True) -> DraftPlan:
    return DraftPlan(
        step=1,
        requests=tuple(DraftRequest(slot=slot, max_tokens=LENGTHS[slot], new_blocks=()) for slot in slots),
        wants_top_ids=wants_top_ids,
    )


def likeliest(pair: tuple[Path, Path], draft: Draft, num_top: int) -> list[set[int]]:
    """Oracle: prompt and draft in one forward of another copy of the model."""
    runner, table = make_runner(pair[1], TorchBackend()), BlockTable(1, 4)
    table.append(0, (0, 1, 2))
    token_ids = (*PROMPTS[draft.slot], *draft.token_ids)
    runner.forward(
        table.gather((SequenceRows(slot=0, start=0, token_ids=token_ids, new_blocks=(), samples=True),))
    )
    first = len(PROMPTS[draft.slot]) - 1
    logits = runner.logits(range(first, first + len(draft.token_ids)))
    return [set(line) for line in logits.topk(num_top, -1).indices.tolist()]


def test_a_model_names_its_likeliest_tokens_at_the_place_of_each_that_it_drafts(pair: tuple[Path, Path]) -> None:
    """Drafts end at different passes, prompts are computed in pieces; order is draft after draft all the same."""
    found = model_drafter(pair, 9).propose(drafting_plan((2, 0, 3, 1)))
    assert [len(draft.token_ids) for draft in found.drafts] == [1, 3, 4, 5]
    assert found.top_ids is not None
    expected = [line for draft in found.drafts for line in likeliest(pair, draft, 9)]
    assert [set(line) for line in found.top_ids.tolist()] == expected


def test_likely_tokens_are_named_only_when_asked_for(pair: tuple[Path, Path]) -> None:
    assert model_drafter(pair, 0).propose(drafting_plan((0, 1))).top_ids is None
    assert model_drafter(pair, 9).propose(drafting_plan((0, 1), wants_top_ids=False)).top_ids is None


def test_among_drafts_of_a_model_those_from_text_name_nothing(pair: tuple[Path, Path]) -> None:
    """Two tokens of a match of five are worth more than one of the model, and less than three."""
    both = TextAndModel(CombinedLookup([TextDrafter()]), model_drafter(pair, 9))
    selected = SelectedDrafter(both, num_slots=NUM_SLOTS, cap=CAP, model_cap=CAP)
    found = selected.propose(drafting_plan((0, 2, 3, 1)))
    assert [draft.method for draft in found.drafts] == ["draft_model", "ngram", "draft_model", "draft_model"]
    assert found.top_ids is not None
    expected = [
        {NO_TOP} if line is None else line
        for draft in found.drafts
        for line in ([None] if draft.method == "ngram" else likeliest(pair, draft, 9))
    ]
    assert [set(line) for line in found.top_ids.tolist()] == expected
