"""Blocks of a head's own cache: no block is lost, and none is held twice."""

import random

import pytest

from faser.engine.execution.drafting.head_memory import HeadCache
from faser.engine.execution.runner.batch import BlockTable

NUM_SLOTS, NUM_BLOCKS, BLOCK_SIZE, MAX_BLOCKS = 4, 10, 4, 6


def make_cache() -> HeadCache:
    table = BlockTable(NUM_SLOTS, MAX_BLOCKS)
    return HeadCache(table, num_slots=NUM_SLOTS, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


@pytest.mark.parametrize("seed", range(5))
def test_every_block_is_free_or_held_by_one_slot(seed: int) -> None:
    rng, cache = random.Random(seed), make_cache()
    for _ in range(300):
        slot, places = rng.randrange(NUM_SLOTS), rng.randrange(1, MAX_BLOCKS * BLOCK_SIZE + 1)
        held = len(cache.table.blocks(slot))
        if rng.random() < 0.3:
            cache.begin_anew(slot)
            assert not cache.table.blocks(slot)
            assert not cache.num_rows(slot)
        elif cache.reserve(slot, places):
            cache.set_rows(slot, rng.randint(0, places))
        else:
            assert len(cache.table.blocks(slot)) == held
        cache.check_invariants()


def test_a_slot_that_begins_anew_leaves_its_blocks_to_others() -> None:
    cache = make_cache()
    assert cache.reserve(0, MAX_BLOCKS * BLOCK_SIZE)
    assert not cache.reserve(1, 5 * BLOCK_SIZE), "four are left"
    cache.begin_anew(0)
    assert cache.reserve(1, 5 * BLOCK_SIZE)
