"""Drafts of a second model: whatever happened to slot, blocks and cache, they are the model's own greedy tokens.

Planted bugs that these tests have caught: one token too many counts as computed after an acceptance; what was
refused, or drafted and never a row, counts as computed; nothing is caught up; a block keeps its mark while it is
written; a block that lost its mark counts as marked; one position too many is drafted.
"""

import random
from pathlib import Path

import pytest

from faser.engine.execution.drafting.draft_model import DraftKvCache, DraftModel
from faser.engine.execution.drafting.loop import ModelPasses, PassLoop
from faser.engine.execution.drafting.samplers import GreedyDraftSampler
from faser.engine.execution.runner.batch import BlockTable
from tests.checkpoints import VOCAB_SIZE
from tests.engine.execution.draft_lines import lines_of
from tests.engine.execution.drafting.driving import (
    BLOCK_SIZE,
    MAX_LEN,
    MAX_ROWS,
    NUM_BLOCKS,
    NUM_SLOTS,
    Oracle,
    World,
    check_drafts,
    make_runner,
)


@pytest.fixture(scope="module")
def oracle(tiny_checkpoint: Path) -> Oracle:
    return Oracle(tiny_checkpoint)


def make_world(directory: Path, seed: int = 0, *, max_positions: int = MAX_LEN) -> tuple[World, DraftKvCache]:
    table = BlockTable(NUM_SLOTS, -(-MAX_LEN // BLOCK_SIZE))
    kv = DraftKvCache(table, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    choice = GreedyDraftSampler()
    passes = ModelPasses(make_runner(directory), table, max_rows=MAX_ROWS)
    drafter = DraftModel(PassLoop(passes, choice), passes, kv, choice, max_positions=max_positions)
    return World(drafter, table, random.Random(seed)), kv


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.full(but=("0",))
def test_whatever_happens_drafts_are_the_models_own_tokens(
    tiny_checkpoint: Path, oracle: Oracle, seed: int
) -> None:
    """Oracle: greedy decoding from the first token on, in a cache of its own."""
    world, kv = make_world(tiny_checkpoint, seed)
    rng = world.rng
    texts = [[rng.randrange(VOCAB_SIZE) for _ in range(40)] for _ in range(2)]
    waiting: list[list[int]] = []
    for _ in range(40):
        for slot in range(NUM_SLOTS):
            line = world.lines.get(slot)
            if line is None and rng.random() < 0.6:
                again = waiting and rng.random() < 0.5
                prompt = waiting.pop() if again else rng.choice(texts)[: rng.randrange(1, 40)]
                world.start(slot, prompt)
            elif line is not None and (rng.random() < 0.1 or len(line.token_ids) > MAX_LEN - 16):
                if len(line.token_ids) < MAX_LEN - 16:
                    waiting.append(line.token_ids)  # preempted: it comes back with what it has generated
                world.release(slot)
        requests = {slot: rng.randrange(1, 7) for slot in world.lines if rng.random() < 0.6}
        drafts = lines_of(world.propose(requests).table)
        kv.check_invariants()
        assert [len(draft.token_ids) for draft in drafts] == list(requests.values())
        check_drafts(world, drafts, oracle)
        world.commit(
            {
                slot: world.accept(slot, rng.randint(0, len(line.draft)))
                for slot, line in world.lines.items()
                if rng.random() < 0.9  # the others were left out of the step
            }
        )
        kv.check_invariants()
    assert world.num_adopted > 0


def test_a_block_that_was_written_since_is_not_taken_for_what_it_held(
    tiny_checkpoint: Path, oracle: Oracle
) -> None:
    """A sequence's blocks go to one that begins like it, then drafts over the rest, then back to the first."""
    world, _ = make_world(tiny_checkpoint)
    text = [world.rng.randrange(VOCAB_SIZE) for _ in range(3 * BLOCK_SIZE + 1)]
    lengths = {"first": len(text), "other": BLOCK_SIZE + 1, "first again": len(text)}
    held = []
    for length in lengths.values():
        world.start(0, text[:length])
        check_drafts(world, lines_of(world.propose({0: 3 * BLOCK_SIZE - 1}).table), oracle)
        held.append(world.lines[0].blocks.blocks[:3])
        world.release(0)
    assert held[0] == held[1] == held[2], "the test is about blocks that come back in the same order"


def test_a_cached_prompt_is_not_computed_again(tiny_checkpoint: Path, oracle: Oracle) -> None:
    world, _ = make_world(tiny_checkpoint)
    text = [world.rng.randrange(VOCAB_SIZE) for _ in range(8 * BLOCK_SIZE + 2)]
    world.start(0, text)
    assert world.propose({0: 2}).catchup_tokens == len(text) - 2
    world.commit({0: world.accept(0, 1)})
    world.start(1, [*text, 5])
    found = world.propose({1: 2})
    check_drafts(world, lines_of(found.table), oracle)
    assert world.num_adopted == 8
    assert found.catchup_tokens == len(text) + 1 - 8 * BLOCK_SIZE - 2


@pytest.mark.parametrize("count, accepted", [(4, 0), (4, 2), (4, 3), (4, 4), (1, 0), (1, 1)])
def test_without_a_pause_nothing_is_caught_up(tiny_checkpoint: Path, count: int, accepted: int) -> None:
    world, _ = make_world(tiny_checkpoint)
    world.start(0, list(range(30)))
    assert world.propose({0: count}).passes == count + 30 // MAX_ROWS
    world.commit({0: world.accept(0, accepted)})
    found = world.propose({0: count})
    assert (found.passes, found.catchup_tokens) == (count, 0)


def test_a_pause_is_caught_up_whole_before_anything_is_drafted(tiny_checkpoint: Path, oracle: Oracle) -> None:
    world, _ = make_world(tiny_checkpoint)
    world.start(0, list(range(10)))
    world.propose({0: 3})
    world.commit({0: world.accept(0, 3)})
    for token_id in range(20):
        world.commit({0: (token_id,)})
    found = world.propose({0: 3})
    check_drafts(world, lines_of(found.table), oracle)
    assert found.catchup_tokens == 20  # the last drafted token was no row, and the last token never is one


def test_a_draft_ends_with_the_draft_models_context(tiny_checkpoint: Path, oracle: Oracle) -> None:
    """The token after the last position can still be drafted; what lies beyond gets an empty draft."""
    world, _ = make_world(tiny_checkpoint, max_positions=20)
    lengths = {0: 17, 1: 20, 2: 21}
    for slot, length in lengths.items():
        world.start(slot, list(range(length)))
    found = world.propose(dict.fromkeys(lengths, 9))
    assert [len(draft.token_ids) for draft in lines_of(found.table)] == [4, 1, 0]
    check_drafts(world, lines_of(found.table), oracle)


def test_samples_that_share_a_prompt_draft_as_if_each_had_its_own(tiny_checkpoint: Path, oracle: Oracle) -> None:
    """All of them write the shared blocks at once, and continue differently after them."""
    world, _ = make_world(tiny_checkpoint)
    prompt = [world.rng.randrange(VOCAB_SIZE) for _ in range(5 * BLOCK_SIZE)]
    world.start(0, prompt)
    world.commit({0: (1,)})
    for slot in (1, 2, 3):
        world.start(slot, prompt)
        world.commit({slot: (slot + 1,)})
    for _ in range(3):
        check_drafts(world, lines_of(world.propose(dict.fromkeys(range(4), 4)).table), oracle)
        world.commit({slot: world.accept(slot, slot) for slot in range(4)})
    assert world.num_adopted == 3 * 4  # the last block of the prompt is each one's own


def test_proposing_changes_nothing_that_a_second_proposal_could_see(tiny_checkpoint: Path) -> None:
    world, _ = make_world(tiny_checkpoint)
    world.start(0, list(range(2 * BLOCK_SIZE)))
    first, again, shorter = (lines_of(world.propose({0: count}).table)[0].token_ids for count in (5, 5, 3))
    assert first == again
    assert first[:3] == shorter
