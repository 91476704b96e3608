"""Overlapped drafting after tokens that are still being verified: the draft is as if they were known.

Oracle: the same model, started anew with the known and the unverified tokens, in a KV cache of its own, bit for
bit. On the native kernels, whose rows have the same bits whatever their neighbours.

Planted bugs that these tests have caught: keys and values of rejected tokens stay; a draft of which all tokens
were accepted is computed again; the last unverified token is no row; a block counts as full with tokens that
were not accepted; the context ends after the unverified tokens; the noise of a coupled draft is that of the
position without them.
"""

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceStart
from faser.engine.control.kv_cache import KvManager
from faser.engine.execution.drafting.draft_model import DraftKvCache, DraftModel
from faser.engine.execution.drafting.loop import ModelPasses, PassLoop
from faser.engine.execution.drafting.samplers import (
    DraftSampler,
    GreedyDraftSampler,
    ProbabilisticDraftSampler,
    SampleAndMatchDraftSampler,
)
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.parameters import SamplingState
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.types.sampling import SamplingParams
from tests.checkpoints import VOCAB_SIZE
from tests.engine.execution.draft_lines import DraftLine, lines_of
from tests.engine.execution.drafting.driving import MAX_LEN, MAX_ROWS, NUM_BLOCKS, NUM_SLOTS, World, kv_shape

BLOCK_SIZE = 16  # the native kernels' smallest
Choice = Callable[[SamplingState], DraftSampler]


def coupled(state: SamplingState) -> DraftSampler:
    return SampleAndMatchDraftSampler(state)


def greedy(_state: SamplingState) -> DraftSampler:
    return GreedyDraftSampler()


@pytest.fixture(scope="module")
def runners(tiny_checkpoint: Path, kernel_cache: Path) -> tuple[Runner, Runner]:
    """One model twice, each with a cache and threads of its own."""
    return make_runner(tiny_checkpoint, kernel_cache), make_runner(tiny_checkpoint, kernel_cache)


def make_runner(directory: Path, kernel_cache: Path) -> Runner:
    backend = NativeBackend(library_path(cache_dir=kernel_cache), num_threads=1)
    decoder = load_decoder(
        directory, backend, torch.float32, max_model_len=MAX_LEN, max_rows=MAX_ROWS, progress=lambda *_: None
    )
    return Runner(decoder, backend, replace(kv_shape(decoder), block_size=BLOCK_SIZE))


def make_world(
    runner: Runner, choose: Choice, seed: int = 0, *, max_positions: int = MAX_LEN
) -> tuple[World, DraftKvCache]:
    table = BlockTable(NUM_SLOTS, -(-MAX_LEN // BLOCK_SIZE))
    kv = DraftKvCache(table, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    state = SamplingState(NUM_SLOTS)
    choice = choose(state)
    passes = ModelPasses(runner, table, max_rows=MAX_ROWS)
    drafter = DraftModel(PassLoop(passes, choice), passes, kv, choice, max_positions=max_positions)
    return World(drafter, table, random.Random(seed), kv=KvManager(NUM_BLOCKS, BLOCK_SIZE), sampling=state), kv


class Afresh:
    """Drafts of sequences that start anew."""

    def __init__(self, runner: Runner, choose: Choice) -> None:
        self._runner = runner
        self._choose = choose

    def draft(self, slot: int, token_ids: list[int], count: int, temperature: float) -> DraftLine:
        table = BlockTable(NUM_SLOTS, -(-MAX_LEN // BLOCK_SIZE))
        table.append(slot, tuple(range(-(-(len(token_ids) + count) // BLOCK_SIZE))))
        kv = DraftKvCache(table, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        state = SamplingState(NUM_SLOTS)
        choice = self._choose(state)
        passes = ModelPasses(self._runner, table, max_rows=MAX_ROWS)
        drafter = DraftModel(PassLoop(passes, choice), passes, kv, choice, max_positions=MAX_LEN)
        start = SequenceStart(
            slot=slot,
            sampling=SamplingParams(temperature=temperature),
            seed=slot + 100,
            prompt_len=len(token_ids),
            token_ids=tuple(token_ids),
        )
        state.start(start)
        drafter.start(start)
        wish = DraftRequest(slot=slot, max_tokens=count, new_blocks=())
        (draft,) = lines_of(drafter.propose(DraftPlan(step=1, width=16, requests=(wish,))).table)
        return draft


@pytest.mark.parametrize("choose", [greedy, coupled])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.full(but=("0-greedy", "1-coupled"))
def test_a_draft_is_as_if_the_unverified_tokens_were_known_whatever_is_accepted(
    runners: tuple[Runner, Runner], choose: Choice, seed: int
) -> None:
    """Chunks verified whole, in part or not at all, invented chunks, pauses, preemption and shared blocks."""
    world, kv = make_world(runners[0], choose, seed)
    afresh, rng = Afresh(runners[1], choose), world.rng
    temperature = 0.9
    texts = [[rng.randrange(VOCAB_SIZE) for _ in range(60)] for _ in range(2)]
    chunks: dict[int, tuple[int, ...]] = {}
    num_whole = 0
    for _ in range(30):
        for slot in range(NUM_SLOTS):
            line = world.lines.get(slot)
            if line is None and rng.random() < 0.6:
                world.start(slot, rng.choice(texts)[: rng.randrange(1, 60)], temperature=temperature)
                chunks[slot] = ()
            elif line is not None and (rng.random() < 0.05 or len(line.token_ids) > MAX_LEN - 24):
                world.release(slot)
        for slot, chunk in chunks.items():
            made_up = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(4)))
            chunks[slot] = rng.choice([chunk, chunk, chunk[: rng.randrange(5)], made_up])
        requests = {slot: rng.randrange(1, 7) for slot in world.lines if rng.random() < 0.8}
        for draft in lines_of(world.propose(requests, unverified=chunks).table):
            known = world.lines[draft.slot].token_ids
            unverified = chunks[draft.slot]
            assert draft == afresh.draft(draft.slot, [*known, *unverified], requests[draft.slot], temperature)
        kv.check_invariants()
        came: dict[int, tuple[int, ...]] = {}
        for slot, line in world.lines.items():
            chunk, draft_ids = chunks[slot], line.draft
            whole = rng.random() < 0.7
            agreed = chunk if whole else chunk[: rng.randint(0, len(chunk))]
            own = draft_ids[0] if draft_ids and whole and rng.random() < 0.8 else rng.randrange(VOCAB_SIZE)
            came[slot] = (*agreed, own)
            passed = (*chunk, *draft_ids[:1]) == came[slot] and slot in requests
            chunks[slot] = draft_ids[1:] if passed else ()
            num_whole += passed
        world.commit(came)
        kv.check_invariants()
    assert num_whole > 20
    assert world.num_adopted > 0


def test_accepted_tokens_are_not_computed_again(runners: tuple[Runner, Runner]) -> None:
    """A chain of accepted chunks costs one row per token: only passes that draft."""
    world, _ = make_world(runners[0], greedy)
    world.start(0, list(range(10)))
    chunk: tuple[int, ...] = ()
    for step in range(6):
        found = world.propose({0: 4}, unverified={0: chunk})
        assert (found.passes, found.catchup_tokens) == (4, 8 if step == 0 else 0)
        draft = world.lines[0].draft
        world.commit({0: (*chunk, draft[0])})
        chunk = draft[1:]


def test_a_draft_ends_with_the_draft_models_context_whatever_is_unverified(runners: tuple[Runner, Runner]) -> None:
    world, _ = make_world(runners[0], greedy, max_positions=20)
    for slot, length in {0: 14, 1: 17, 2: 18}.items():
        world.start(slot, list(range(length)))
    found = world.propose(dict.fromkeys(range(3), 9), unverified=dict.fromkeys(range(3), (1, 2, 3)))
    assert [len(draft.token_ids) for draft in lines_of(found.table)] == [4, 1, 0]


def test_it_drafts_the_same_while_a_target_computes(runners: tuple[Runner, Runner]) -> None:
    """Meanwhile another thread runs another model over the same block table."""
    world, _ = make_world(runners[0], greedy)
    world.start(0, list(range(12)))
    unverified = {0: (1, 2, 3)}
    alone = lines_of(world.propose({0: 6}, unverified=unverified).table)
    target, leaving, rounds = runners[1], threading.Event(), 0
    batch = world.table.lay_out(
        [0],
        torch.zeros(1, dtype=torch.int32).numpy(),
        torch.full((1,), 12, dtype=torch.int32).numpy(),
        torch.arange(12).numpy(),
    )

    def compute() -> None:
        nonlocal rounds
        while not leaving.is_set():
            target.forward(batch)
            rounds += 1

    computing = threading.Thread(target=compute)
    computing.start()
    try:
        drafts = [lines_of(world.propose({0: 6}, unverified=unverified).table) for _ in range(20)]
    finally:
        leaving.set()
        computing.join()
    assert drafts == [alone] * 20
    assert rounds > 0


def test_sampled_drafts_do_not_overlap(runners: tuple[Runner, Runner]) -> None:
    world, _ = make_world(runners[0], ProbabilisticDraftSampler)
    world.start(0, [1, 2, 3], temperature=1.0)
    assert not world.drafter.drafts_overlapped
    assert world.propose({0: 2}).probs is not None
    with pytest.raises(AssertionError, match="drafts that are drawn cannot continue unverified tokens"):
        world.propose({0: 2}, unverified={0: (4,)})


@pytest.mark.parametrize("choose", [greedy, coupled])
def test_point_masses_may_overlap(runners: tuple[Runner, Runner], choose: Choice) -> None:
    assert make_world(runners[0], choose)[0].drafter.drafts_overlapped


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_drafting_ends_when_verification_is_done_and_continues_there(
    runners: tuple[Runner, Runner], allowed: int
) -> None:
    """A given number of passes is allowed after the first one. Computed tokens are not computed again."""
    world, kv = make_world(runners[0], greedy)
    world.start(0, list(range(9)))
    whole = lines_of(world.propose({0: 5}).table)[0].token_ids
    world.start(1, list(range(9)))
    asked = iter(range(allowed + 1))

    found = world.propose({1: 5}, until=lambda: next(asked) >= allowed)

    kv.check_invariants()
    assert found.passes == allowed + 1
    assert lines_of(found.table)[0].token_ids == whole[: allowed + 1]
    world.commit({1: whole[: allowed + 1]})
    again = world.propose({1: 4 - allowed})
    assert lines_of(again.table)[0].token_ids == whole[allowed + 1 :]
    assert again.passes == 4 - allowed
