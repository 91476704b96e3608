"""What is published was computed, through all layers and behind the tokens it is said to hold.

A sample is dropped in the middle, and a new request repeats all it has said: the scripted executor fails where a
block of the prefix index has a place that was never written, or that a refused or pruned row wrote last. Seen to
fail: published up to the last known token, which is not computed yet.
"""

import random

import pytest

from faser.engine.control.kv_cache import KvManager, SequenceBlocks
from tests.engine.driving import BLOCK_SIZE, Driver, request
from tests.fakes import RandomPolicy, ScriptedExecutor

NUM_BLOCKS = 24
NUM_TURNS = 4
SEEDS = range(60)


class PublishesOneMore(KvManager):
    """Planted: the last known token counts as computed."""

    def publish(self, table: SequenceBlocks, token_ids: list[int], num_computed: int) -> None:
        super().publish(table, token_ids, min(num_computed + 1, len(token_ids)))

    def next_full(self, num_computed: int) -> int:
        return super().next_full(num_computed) - 1


def repeat_what_was_said(kv: KvManager, seed: int, *, ahead: bool) -> int:
    """One sample after another, each beginning with all that the last one came to; tokens found in the cache."""
    rng = random.Random(seed)
    executor = ScriptedExecutor(block_size=BLOCK_SIZE, prunes=rng)
    driver = Driver(speculates=RandomPolicy(seed), ahead=ahead, kv=kv, executor=executor)
    prompt = [100 + seed]
    for turn in range(NUM_TURNS):
        asked = request(str(turn), prompt, seed=seed, max_tokens=12)
        driver.add(asked)
        for _ in range(rng.randint(2, 8)):
            if driver.scheduler.has_work():
                driver.step()
        driver.abort(asked.request_id)
        prompt = [*prompt, *driver.samples[asked.request_id, 0].token_ids, 300]
    return driver.scheduler.stats().prefix_cache_hits


def repeat_often(pool: type[KvManager], *, ahead: bool) -> int:
    return sum(repeat_what_was_said(pool(NUM_BLOCKS, BLOCK_SIZE), seed, ahead=ahead) for seed in SEEDS)


@pytest.mark.parametrize("ahead", [False, True])
def test_what_others_find_of_a_dropped_sample_was_computed_to_the_end(ahead: bool) -> None:
    assert repeat_often(KvManager, ahead=ahead) > len(SEEDS) * BLOCK_SIZE


@pytest.mark.parametrize("ahead", [False, True])
def test_a_token_published_before_it_was_computed_is_caught(ahead: bool) -> None:
    with pytest.raises(AssertionError, match=r"which was never written|finds a foreign"):
        repeat_often(PublishesOneMore, ahead=ahead)
