"""Passes fed what the last one chooses: the drafts of the loop that waits, launched before they are known.

Oracles: PassLoop, bit for bit, on the native kernels, where a row has the same bits whatever its neighbours; the
rule's words in plain loops, one pass late; for whole engines, one that never drafts.

Planted bugs that these tests have caught: tokens, block tables, seeds or temperatures of who went on before; the
noise of the token that is fed; every fed token counted, dropped ones too; the last pass never read; a rule that
waits for the pass that runs, or ends nothing; a last row that comes too early; all layers from the second pass on.
"""

import math
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from faser.config.speculation import SpeculationConfig
from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceStart, StopRule
from faser.engine.control.kv_cache import KvManager
from faser.engine.control.speculation.overlap import OverlapOptions
from faser.engine.execution.drafting.draft_model import DraftKvCache, DraftModel
from faser.engine.execution.drafting.fed_loop import FedPassLoop
from faser.engine.execution.drafting.loop import DraftInput, DraftLoop, ModelPasses, PassLoop, spread
from faser.engine.execution.drafting.registry import DrafterParts, DraftModelParts, make_drafter
from faser.engine.execution.drafting.samplers import (
    DraftRows,
    DraftSampler,
    DraftTokens,
    GreedyDraftSampler,
    PointMassSampler,
    SampleAndMatchDraftSampler,
    TokensAhead,
    drafted_by_runner,
)
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.kernels import TorchSamplingKernels
from faser.engine.execution.sampling.parameters import SamplingState
from faser.engine.execution.sampling.tokens import LOGITS_ONLY, HostTokenSampler, SampledTokens, TokenSampler
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.interface.sampling import SamplingMetadata
from faser.types.arrays import NO_TOKEN, Ints
from faser.types.request import Request
from faser.types.sampling import SamplingParams
from tests.checkpoints import VOCAB_SIZE
from tests.engine.execution import pruning_world
from tests.engine.execution.draft_lines import DraftLine, lines_of, margins_of, same, tokens_of
from tests.engine.execution.drafting.driving import MAX_LEN, MAX_ROWS, NUM_BLOCKS, NUM_SLOTS, World, kv_shape

BLOCK_SIZE = 16  # the native kernels' smallest
NO_STOP = -1.0  # a price that nobody is below


@dataclass
class Late:
    """A Pending whose tokens lie where the next choice puts its own."""

    tokens: Tensor
    choices: SampledTokens
    note: Callable[[], None]

    def wait(self) -> SampledTokens:
        self.note()
        return self.choices


@dataclass
class LateChooser:
    """Chooses as another one does, into one place, and notes what happens in which order.

    broken: at these positions logits count as no numbers.
    """

    chooser: TokenSampler
    broken: frozenset[int] = frozenset()
    events: list[str] = field(default_factory=list)
    asked: list[list[tuple[int, int]]] = field(default_factory=list)  # by choice: seeds and positions
    place: Tensor = field(default_factory=lambda: torch.zeros(MAX_ROWS, dtype=torch.int64))

    def take(self, logits: Tensor, requests: SamplingMetadata) -> Late:
        raise AssertionError(f"{len(requests)} tokens are taken of {len(logits)} rows; drafts are guesses")

    def draft(self, logits: Tensor, requests: SamplingMetadata) -> Late:
        found = self.chooser.draft(logits, requests).wait()
        assert found.margins is not None
        at = np.isin(requests.positions, list(self.broken))
        found = SampledTokens(
            token_ids=np.where(at, NO_TOKEN, found.token_ids), margins=np.where(at, 0.0, found.margins)
        )
        number = len(self.asked) + 1
        self.asked.append(list(zip(requests.seeds.tolist(), requests.positions.tolist(), strict=True)))
        self.events.append(f"launch {number}")
        tokens = self.place[: len(requests)]
        tokens.copy_(torch.from_numpy(found.token_ids))
        return Late(tokens, found, lambda: self.events.append(f"read {number}"))


@dataclass(frozen=True, slots=True)
class Flawed:
    """A choice to which logits are no numbers at these positions."""

    choice: DraftSampler
    broken: frozenset[int]
    draws: bool = False

    def choose(self, logits: Tensor, rows: DraftRows, ids: Ints | None = None) -> DraftTokens:
        found = self.choice.choose(logits, rows, ids)
        at = np.isin(rows.positions, list(self.broken))
        return DraftTokens(token_ids=np.where(at, 0, found.token_ids), margins=np.where(at, 0.0, found.margins))


@dataclass
class Script:
    """Chooses token `position` with the margin that is scripted for (slot, position), whoever asks."""

    margins: Mapping[tuple[int, int], float]
    draws: bool = False

    def metadata(self, slots: Ints, positions: Ints) -> SamplingMetadata:
        return replace(SamplingMetadata.greedy(positions), seeds=slots.astype(np.uint64))

    def ahead(self, _slots: Ints, _draft_starts: Ints, _width: int) -> TokensAhead:
        raise AssertionError("nothing is drafted in one call")

    def draft(self, logits: Tensor, requests: SamplingMetadata) -> Late:
        assert len(logits) == len(requests)
        slots, positions = requests.seeds.tolist(), requests.positions.tolist()
        scripted = np.array([self.margins[key] for key in zip(slots, positions, strict=True)])
        choices = SampledTokens(token_ids=requests.positions.copy(), margins=scripted)
        return Late(torch.from_numpy(choices.token_ids), choices, lambda: None)

    def choose(self, logits: Tensor, rows: DraftRows, _ids: Ints | None = None) -> DraftTokens:
        assert len(logits) == len(rows.slots)
        scripted = [self.margins[key] for key in zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)]
        return DraftTokens(token_ids=rows.positions.copy(), margins=np.array(scripted))


def coupled(state: SamplingState) -> SampleAndMatchDraftSampler:
    return SampleAndMatchDraftSampler(state)


def greedy(_state: SamplingState) -> GreedyDraftSampler:
    return GreedyDraftSampler()


Choice = Callable[[SamplingState], PointMassSampler]


class Pair:
    """One model twice, each with a cache of its own: once for a loop that waits, once for one that does not."""

    def __init__(self, directory: Path, kernel_cache: Path) -> None:
        self._directory = directory
        self._kernels = library_path(cache_dir=kernel_cache)
        self.plain = self.runner(LOGITS_ONLY)

    def runner(self, chooser: TokenSampler) -> Runner:
        backend = NativeBackend(self._kernels, num_threads=1)
        decoder = load_decoder(
            self._directory,
            backend,
            torch.float32,
            max_model_len=MAX_LEN,
            max_rows=MAX_ROWS,
            progress=lambda *_: None,
        )
        return Runner(decoder, backend, replace(kv_shape(decoder), block_size=BLOCK_SIZE), chooser)


@pytest.fixture(scope="module")
def pair(tiny_checkpoint: Path, kernel_cache: Path) -> Pair:
    return Pair(tiny_checkpoint, kernel_cache)


def fed_loop(
    runner: Runner,
    table: BlockTable,
    choice: PointMassSampler,
) -> FedPassLoop:
    return FedPassLoop(ModelPasses(runner, table, max_rows=MAX_ROWS), choice)


def late(broken: frozenset[int] = frozenset()) -> LateChooser:
    return LateChooser(HostTokenSampler(TorchSamplingKernels()), broken)


def full_table(num_slots: int) -> BlockTable:
    table, each = BlockTable(num_slots, 6), MAX_LEN // BLOCK_SIZE
    for slot in range(num_slots):
        table.append(slot, tuple(range(slot * each, (slot + 1) * each)))
    return table


def start(state: SamplingState, slot: int, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, top_p=0.9 if slot % 2 else 1.0, top_k=7 if slot == 2 else 0)
    state.start(SequenceStart(slot=slot, sampling=sampling, seed=slot + 100, prompt_len=1, token_ids=(slot + 1,)))


def random_inputs(rng: random.Random, texts: list[list[int]], computed: list[int]) -> list[DraftInput]:
    """Of some slots, what lies behind the computed positions of their texts; computed becomes what then is."""
    found = []
    for slot in sorted(rng.sample(range(len(texts)), rng.randint(1, len(texts)))):
        start = rng.randint(0, computed[slot])
        count = rng.choice((1, 1, 2, rng.randint(1, 40)))
        token_ids = tuple(texts[slot][start : start + count])
        found.append(DraftInput(slot=slot, start=start, token_ids=token_ids, max_tokens=rng.randint(1, 7)))
        computed[slot] = start + count
    return found


@pytest.mark.parametrize("choose", [greedy, coupled])
@pytest.mark.parametrize("broken", [frozenset(), frozenset({7, 8, 20, 33})], ids=["sound", "broken"])
def test_without_a_rule_the_round_is_that_of_the_loop_that_waits(
    pair: Pair, choose: Choice, broken: frozenset[int]
) -> None:
    """Catch-up in pieces, other lengths for everybody, temperatures, truncations; logits that are no numbers."""
    num_slots, rng = 8, random.Random(3)
    table, state = full_table(num_slots), SamplingState(num_slots)
    choice = choose(state)
    for slot in range(num_slots):
        start(state, slot, temperature=0.0 if slot % 3 == 0 else 0.9)
    chooser = late(broken)
    plain = PassLoop(ModelPasses(pair.plain, table, max_rows=MAX_ROWS), Flawed(choice, broken))
    fed = fed_loop(pair.runner(chooser), table, choice)
    texts = [[rng.randrange(VOCAB_SIZE) for _ in range(80)] for _ in range(num_slots)]
    computed = [0] * num_slots
    num_pieces = 0
    for _ in range(25):
        asked = random_inputs(rng, texts, computed)
        found = fed.draft(asked, None)
        assert same(found, plain.draft(asked, None))
        num_pieces += found.passes - max(each.max_tokens for each in asked)
    assert num_pieces > 25
    assert len({seed for asked in chooser.asked for seed, _ in asked}) == (1 if choose is greedy else num_slots)


@pytest.mark.parametrize("choose", [greedy, coupled])
def test_the_price_of_a_row_keeps_the_same_tokens(pair: Pair, choose: Choice) -> None:
    """One pass more at most, for those whose last token was not known to be dropped when it was launched."""
    num_slots, rng = 8, random.Random(4)
    table, state = full_table(num_slots), SamplingState(num_slots)
    choice = choose(state)
    for slot in range(num_slots):
        start(state, slot, temperature=0.7)
    plain = PassLoop(ModelPasses(pair.plain, table, max_rows=MAX_ROWS), choice)
    fed = fed_loop(pair.runner(late()), table, choice)
    texts = [[rng.randrange(VOCAB_SIZE) for _ in range(80)] for _ in range(num_slots)]
    computed = [0] * num_slots
    lengths = set()
    for _ in range(25):
        asked = random_inputs(rng, texts, computed)
        stop = StopRule(
            row_price=rng.uniform(0.05, 0.6), pass_prices=(NO_STOP,) * num_slots, intercept=0.5, slope=2.0
        )
        found, expected = fed.draft(asked, stop), plain.draft(asked, stop)
        assert (tokens_of(found), margins_of(found)) == (tokens_of(expected), margins_of(expected))
        assert 0 <= found.passes - expected.passes <= 1
        for s, each in enumerate(asked):
            assert found.num_fed[s] in (expected.num_fed[s], len(tokens_of(found)[s]))
            lengths.add(len(tokens_of(found)[s]) - each.max_tokens)
    assert len(lengths) > 4, "the rule is meant to end drafts at all lengths"


@dataclass
class Words:
    """Oracle: the rule's words, sequence by sequence, where a pass is launched before the last one is read."""

    margins: Mapping[tuple[int, int], float]
    limits: list[int]
    stop: StopRule

    def __post_init__(self) -> None:
        everybody = range(len(self.limits))
        self.launched = [1 for _ in everybody]
        self.lengths = [0 for _ in everybody]
        self.survival = [1.0 for _ in everybody]
        self.passes, willing = 1, list(everybody)
        while on := [s for s in willing if self.limits[s] > self.passes]:
            self.passes += 1
            for s in on:
                self.launched[s] += 1
            willing = self.read(self.passes - 1)
        self.read(self.passes)

    def read(self, number: int) -> list[int]:
        """Keep the tokens of pass `number`; who is to go on."""
        on = []
        for s, launched in enumerate(self.launched):
            if launched < number or self.lengths[s] < number - 1:
                continue
            margin = self.margins[s, KNOWN + number - 1]
            self.survival[s] *= 1 / (1 + math.exp(-(self.stop.intercept + self.stop.slope * margin)))
            if self.survival[s] > self.stop.row_price:
                self.lengths[s] = number
                if number < self.limits[s]:
                    on.append(s)
        excess = sum(self.survival[s] - self.stop.row_price for s in on)
        return on if on and excess > self.stop.pass_prices[len(on) - 1] else []


KNOWN = 3  # tokens of every sequence
DEPTH = 5


@dataclass
class Scripts:
    """A chooser whose script is changed between rounds."""

    script: Script | None = None

    def draft(self, logits: Tensor, requests: SamplingMetadata) -> Late:
        assert self.script is not None
        return self.script.draft(logits, requests)

    def take(self, logits: Tensor, requests: SamplingMetadata) -> Late:
        raise AssertionError(f"{len(requests)} tokens are taken of {len(logits)} rows; drafts are guesses")


@pytest.fixture(scope="module")
def scripts() -> Scripts:
    return Scripts()


@pytest.fixture(scope="module")
def scripted(pair: Pair, scripts: Scripts) -> Runner:
    return pair.runner(scripts)


@given(
    st.lists(st.integers(1, DEPTH), min_size=1, max_size=4),
    st.lists(st.floats(0, 4), min_size=4 * DEPTH, max_size=4 * DEPTH),
    st.floats(0, 0.6),
    st.lists(st.floats(0, 1.5), min_size=4, max_size=4),
)
def test_the_rule_means_what_it_says_one_pass_later(
    pair: Pair,
    scripted: Runner,
    scripts: Scripts,
    limits: list[int],
    drawn: list[float],
    row_price: float,
    pass_prices: list[float],
) -> None:
    """Sums may differ by rounding, so the prices lie off every attainable sum."""
    stop = StopRule(row_price=row_price, pass_prices=tuple(pass_prices), intercept=-0.5, slope=1.1)
    margins = {(s, KNOWN + k): drawn[s * DEPTH + k] for s in range(4) for k in range(DEPTH)}
    scripts.script = script = Script(margins)
    asked = [
        DraftInput(slot=slot, start=0, token_ids=tuple(range(KNOWN)), max_tokens=limit)
        for slot, limit in enumerate(limits)
    ]
    table = full_table(4)
    found = fed_loop(scripted, table, script).draft(asked, stop)
    words = Words(margins, limits, stop)
    assert found.lengths.tolist() == words.lengths
    assert found.passes == words.passes
    for s, length in enumerate(words.lengths):
        assert tokens_of(found)[s] == tuple(range(KNOWN, KNOWN + length))
        assert margins_of(found)[s] == tuple(margins[s, KNOWN + k] for k in range(length))
        assert found.num_fed[s] == min(words.launched[s] - 1, length)

    waited = PassLoop(ModelPasses(pair.plain, table, max_rows=MAX_ROWS), script).draft(asked, stop)
    assert 0 <= found.passes - waited.passes <= 1
    for token_ids, others in zip(tokens_of(found), tokens_of(waited), strict=True):
        assert token_ids[: len(others)] == others
        assert len(token_ids) - len(others) <= 1


def inputs_of(limits: list[int]) -> list[DraftInput]:
    return [
        DraftInput(slot=slot, start=0, token_ids=tuple(range(KNOWN)), max_tokens=limit)
        for slot, limit in enumerate(limits)
    ]


def generous(num_slots: int) -> StopRule:
    """Lets everything in."""
    return StopRule(
        row_price=NO_STOP, pass_prices=(NO_STOP * num_slots * 2,) * num_slots, intercept=0.0, slope=1.0
    )


@pytest.mark.parametrize("rule", [False, True])
def test_a_pass_is_launched_before_the_last_one_is_read(pair: Pair, rule: bool) -> None:
    """The one before that is read before it: no sequence is more than one pass ahead of the stop rule."""
    chooser = late()
    loop = fed_loop(pair.runner(chooser), full_table(3), GreedyDraftSampler())
    loop.draft(inputs_of([4, 2, 4]), generous(3) if rule else None)
    order = "launch 1, launch 2, read 1, launch 3, read 2, launch 4, read 3, read 4"
    assert chooser.events == order.split(", ")
    assert [len(asked) for asked in chooser.asked] == [3, 3, 2, 2]


def test_until_ends_all_drafts_where_they_are(pair: Pair) -> None:
    """Running passes are read. The passes over the inputs, here two, are always made."""
    asked = [
        DraftInput(slot=s, start=0, token_ids=tuple(range(length)), max_tokens=5)
        for s, length in enumerate([3, MAX_ROWS])
    ]
    chooser = late()
    loop = fed_loop(pair.runner(chooser), full_table(2), GreedyDraftSampler())
    for stop in (None, generous(2)):
        for allowed in range(5):
            chooser.events.clear()
            asked_after: list[int] = []

            def until(allowed: int = allowed, asked_after: list[int] = asked_after) -> bool:
                asked_after.append(sum(event.startswith("read") for event in chooser.events))
                return len(asked_after) > allowed

            found = loop.draft(asked, stop, until)
            assert found.passes == 2 + allowed
            assert found.lengths.tolist() == [1 + allowed] * 2
            assert found.num_fed.tolist() == [allowed] * 2
            assert asked_after == list(range(min(allowed + 1, 4)))


def test_a_guess_becomes_the_token_and_the_margin_that_a_choice_makes_of_the_same_logits() -> None:
    logits = torch.full((4, 6), -torch.inf)
    logits[0, 4] = 1.0
    logits[1] = torch.nan
    logits[2, :2] = torch.tensor([300.0, 1.0])
    logits[3, :2] = torch.tensor([2.0, 2.5])
    rows = np.arange(4)
    state = SamplingState(4)
    for slot in rows.tolist():
        start(state, slot, temperature=0.5)
    for choice in (GreedyDraftSampler(), SampleAndMatchDraftSampler(state)):
        expected = choice.choose(logits, DraftRows(slots=rows, positions=rows + 9, draft_starts=rows + 9))
        asked = choice.metadata(rows, rows + 9)
        found = drafted_by_runner(HostTokenSampler(TorchSamplingKernels()).draft(logits, asked).wait())
        np.testing.assert_array_equal(found.token_ids, expected.token_ids)
        np.testing.assert_array_equal(found.margins, expected.margins)
        assert found.margins[:3].tolist() == [100.0, 0.0, 100.0]


def test_no_input_costs_no_pass(pair: Pair) -> None:
    found = fed_loop(pair.plain, full_table(1), GreedyDraftSampler()).draft([], None)
    assert not len(found.lengths)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(8, 20))
def test_inputs_take_as_few_passes_as_possible_and_all_end_in_the_last(lengths: list[int], max_rows: int) -> None:
    """Rows of a sequence come in order, none twice and none left out."""
    asked = [
        DraftInput(slot=slot, start=100 * slot, token_ids=tuple(range(length)), max_tokens=1)
        for slot, length in enumerate(lengths)
    ]
    passes = spread(asked, max_rows)
    assert len(passes) == -(-sum(lengths) // max_rows)
    done = [0] * len(lengths)
    for pieces in passes:
        assert 0 < sum(len(piece.token_ids) for piece in pieces) <= max_rows
        assert len({piece.slot for piece in pieces}) == len(pieces)
        for piece in pieces:
            count = done[piece.slot]
            assert piece.start == 100 * piece.slot + count
            assert tuple(piece.token_ids) == tuple(range(count, count + len(piece.token_ids)))
            done[piece.slot] += len(piece.token_ids)
    assert done == lengths
    assert [piece.slot for piece in passes[-1]] == list(range(len(lengths)))


@dataclass
class Twins:
    """Two drafters to which the same happens: one waits for its passes, the other one does not."""

    waiting: World
    fed: World
    books: tuple[DraftKvCache, DraftKvCache]
    chooser: LateChooser

    @classmethod
    def made(cls, pair: Pair, choose: Choice, seed: int) -> "Twins":
        chooser = late()
        worlds, books = [], []
        for runner in (pair.plain, pair.runner(chooser)):
            table, state = BlockTable(NUM_SLOTS, -(-MAX_LEN // BLOCK_SIZE)), SamplingState(NUM_SLOTS)
            choice = choose(state)
            passes = ModelPasses(runner, table, max_rows=MAX_ROWS)
            loop: DraftLoop = PassLoop(passes, choice)
            if runner is not pair.plain:
                loop = fed_loop(runner, table, choice)
            kv = DraftKvCache(table, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
            drafter = DraftModel(loop, passes, kv, choice, max_positions=MAX_LEN)
            worlds.append(
                World(drafter, table, random.Random(seed), kv=KvManager(NUM_BLOCKS, BLOCK_SIZE), sampling=state)
            )
            books.append(kv)
        return cls(worlds[0], worlds[1], (books[0], books[1]), chooser)

    def each(self, deed: Callable[[World], object]) -> None:
        for world in (self.waiting, self.fed):
            deed(world)
        for kv in self.books:
            kv.check_invariants()

    def propose(
        self, requests: dict[int, int], stop: StopRule | None, behind: dict[int, tuple[int, ...]]
    ) -> tuple[list[DraftLine], int]:
        """The drafts of both; and how many tokens were fed and then dropped."""
        expected = self.waiting.propose(requests, stop, unverified=behind)
        self.chooser.asked.clear()
        found = self.fed.propose(requests, stop, unverified=behind)
        assert lines_of(found.table) == lines_of(expected.table)
        for kv in self.books:
            kv.check_invariants()
        last: dict[int, int] = {}
        for asked in self.chooser.asked:
            last |= dict(asked)
        stray = 0
        for draft in lines_of(found.table):
            known = len(self.fed.lines[draft.slot].token_ids) + len(behind[draft.slot])
            chosen = last.get(draft.slot + 100, known - 1) - known + 1
            stray += max(0, chosen - 1 - len(draft.token_ids))
        return lines_of(found.table), stray


def random_rule(rng: random.Random) -> StopRule | None:
    if rng.random() < 0.3:
        return None
    return StopRule(
        row_price=rng.uniform(0.05, 0.7), pass_prices=(NO_STOP * 10,) * NUM_SLOTS, intercept=0.5, slope=2.0
    )


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.full(but=("0-0.9", "1-0.0"))
def test_whatever_was_fed_too_far_later_drafts_are_those_of_a_drafter_that_waits(
    pair: Pair, seed: int, temperature: float
) -> None:
    """Chunks verified whole, cut or not at all, pauses, shared blocks, slots given up; rules that end drafts.

    Keys and values of tokens that were fed and dropped lie in all these caches.
    """
    twins = Twins.made(pair, coupled, seed)
    rng = random.Random(seed)
    texts = [[rng.randrange(VOCAB_SIZE) for _ in range(60)] for _ in range(2)]
    chunks: dict[int, tuple[int, ...]] = {}
    num_stray = num_drafted = 0
    for _ in range(40):
        for slot in range(NUM_SLOTS):
            line = twins.fed.lines.get(slot)
            if line is None and rng.random() < 0.6:
                text = rng.choice(texts)[: rng.randrange(1, 60)]
                twins.each(lambda world, slot=slot, text=text: world.start(slot, text, temperature=temperature))  # type: ignore[misc]
                chunks[slot] = ()
            elif line is not None and (rng.random() < 0.05 or len(line.token_ids) > MAX_LEN - 24):
                twins.each(lambda world, slot=slot: world.release(slot))  # type: ignore[misc]
                del chunks[slot]
        for slot, chunk in chunks.items():
            made_up = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(4)))
            chunks[slot] = rng.choice([(), chunk, chunk, chunk[: rng.randrange(5)], made_up])
        requests = {slot: rng.randrange(1, 7) for slot in chunks if rng.random() < 0.8}
        drafts, stray = twins.propose(requests, random_rule(rng), chunks)
        num_stray += stray
        num_drafted += sum(len(draft.token_ids) for draft in drafts)
        committed: dict[int, tuple[int, ...]] = {}
        for slot, line in twins.fed.lines.items():
            chunk, draft_ids = chunks[slot], line.draft
            whole = rng.random() < 0.7
            agreed = chunk if whole else chunk[: rng.randint(0, len(chunk))]
            own = draft_ids[0] if draft_ids and whole and rng.random() < 0.8 else rng.randrange(VOCAB_SIZE)
            committed[slot] = (*agreed, own)
            passed = slot in requests and (*chunk, *draft_ids[:1]) == committed[slot]
            chunks[slot] = draft_ids[1:] if passed else ()
        twins.each(lambda world, committed=committed: world.commit(committed))  # type: ignore[misc]
    assert num_stray > 5
    assert num_drafted > 60


POLICIES = ("fixed", "goodput", "faser")
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "prompt_logprobs": 1},
}
OVERLAP = OverlapOptions(name="cores", share=0.5, mode="on", every=1000)


def requests(**sampling: Any) -> list[Request]:
    rng = random.Random(5)
    texts = [[rng.randrange(15, VOCAB_SIZE) for _ in range(40)] for _ in range(2)]
    return [
        Request(
            request_id=str(i),
            prompt_token_ids=tuple(rng.choice(texts)[: rng.randrange(1, 40)]),
            sampling=SamplingParams(**{"max_tokens": 30 - i, "seed": i, "ignore_eos": True} | sampling),
            arrival_s=float(i),
        )
        for i in range(8)
    ]


@dataclass(frozen=True, slots=True)
class Engines:
    """What engines are made of; the chooser of the runner that drafts."""

    world: pruning_world.World
    of_drafter: LateChooser


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Engines:
    """On two lanes where there are two cores."""
    backend = NativeBackend(library_path(cache_dir=kernel_cache), num_threads=1)
    partition = pruning_world.PatientCores() if len(os.sched_getaffinity(0)) > 1 else None
    chooser = wide()
    directories = pruning_world.write_pair(tmp_path_factory.mktemp("pair"), noise=0.01)
    world = pruning_world.make_world(directories, backend, partition, choosers=(wide(), chooser))
    return Engines(world, chooser)


def wide() -> LateChooser:
    return replace(late(), place=torch.zeros(pruning_world.MAX_ROWS, dtype=torch.int64))


def speculation(**given: Any) -> SpeculationConfig:
    asked: dict[str, Any] = {
        "method": "draft_model",
        "model": "beside",
        "num_speculative_tokens": pruning_world.CAP,
    }
    return SpeculationConfig(**asked | given)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", ["draft_model", "coupled", "beside"])
@pytest.mark.full(
    but=("draft_model-fixed-greedy", "draft_model-faser-greedy", "coupled-goodput-greedy", "beside-fixed-greedy")
)
def test_engines_give_the_tokens_that_they_give_without_drafts(
    engines: Engines, sampling: str, policy: str, how: str
) -> None:
    world, asked = engines.world, requests(**SAMPLING[sampling])
    given: dict[str, Any] = {"policy": policy}
    if how == "coupled":
        given |= {"draft_sample_method": "coupled"}
    elif how == "beside" and world.lanes is None:
        pytest.skip("two lanes take two cores")
    engines.of_drafter.asked.clear()
    engine = pruning_world.make_engine(
        world,
        speculation(**given),
        None,
        overlap=OVERLAP if how == "beside" else None,
        samples_in_runner=True,
    )
    found = pruning_world.answers(engine, asked)
    oracle = pruning_world.make_engine(world, SpeculationConfig(policy="off"), None)
    assert found == pruning_world.answers(oracle, asked)
    stats = engine.stats().speculation
    assert stats is not None
    drafted = sum(each.drafted for each in stats.methods)
    assert not drafted or engines.of_drafter.asked, "drafts came from elsewhere"
    if policy == "fixed":  # the others may find that drafting does not pay
        assert drafted > 50


@pytest.mark.parametrize("sampled", ["greedy", "coupled", "probabilistic"])
@pytest.mark.parametrize("samples_in_runner", [False, True])
def test_the_runner_that_drafts_is_asked_for_point_masses_where_it_may_choose(
    pair: Pair, sampled: str, samples_in_runner: bool
) -> None:
    """Drawn tokens stay with the loop that waits: a guess has no probabilities."""
    of_model, table, state = late(), full_table(1), SamplingState(1)
    parts = DrafterParts(
        table=table,
        sampling=state,
        max_rows=MAX_ROWS,
        model=DraftModelParts(
            runner=pair.runner(of_model),
            kv=DraftKvCache(table, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
            max_positions=MAX_LEN,
        ),
        samples_in_runner=samples_in_runner,
    )
    config = SpeculationConfig(method="draft_model", model="some/model", draft_sample_method=sampled)
    drafter = make_drafter(config, parts)
    begun = SequenceStart(slot=0, sampling=SamplingParams(), seed=1, prompt_len=3, token_ids=(1, 2, 3))
    state.start(begun)
    drafter.start(begun)
    plan = DraftPlan(step=1, width=16, requests=(DraftRequest(slot=0, max_tokens=3, new_blocks=()),))
    assert len(lines_of(drafter.propose(plan).table)[0].token_ids) == 3
    asked = 3 if samples_in_runner and sampled != "probabilistic" else 0
    assert len(of_model.asked) == asked
