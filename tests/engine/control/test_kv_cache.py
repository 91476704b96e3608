"""The block pool against models of it: what is shared, what is closed, what is evicted first."""

import random

import pytest

from faser.engine.control.kv_cache import KvManager, SequenceBlocks
from faser.errors import ConfigError

SIZE = 4


def filled(kv: KvManager, token_ids: list[int], salt: str | None = None) -> SequenceBlocks:
    """A table whose tokens are all computed and published."""
    table = kv.new_table(salt)
    kv.adopt(table, kv.cached_prefix(table, token_ids), num_queried=len(token_ids))
    kv.allocate(table, kv.blocks_for(len(token_ids)) - len(table.blocks))
    kv.publish(table, token_ids, len(token_ids))
    kv.check_invariants()
    return table


def hits(kv: KvManager, token_ids: list[int], salt: str | None = None) -> int:
    return len(kv.cached_prefix(kv.new_table(salt), token_ids))


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0), (-1, 16)])
def test_a_pool_without_blocks_or_tokens_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        KvManager(num_blocks, block_size)


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_tokens_need_whole_blocks(num_tokens: int, blocks: int) -> None:
    assert KvManager(8, SIZE).blocks_for(num_tokens) == blocks


def test_published_blocks_are_found_by_sequences_that_begin_alike() -> None:
    kv = KvManager(8, SIZE)
    table = filled(kv, list(range(10)))

    assert kv.cached_prefix(kv.new_table(), [*range(10), 99]) == table.blocks[:2]
    assert kv.cached_prefix(kv.new_table(), [*range(6), 99, 7, 8, 9, 10]) == table.blocks[:1]
    assert kv.cached_prefix(kv.new_table(), [99, *range(1, 10)]) == []


@pytest.mark.parametrize("num_tokens", range(1, 14))
def test_a_prefix_leaves_at_least_the_last_token_to_compute(num_tokens: int) -> None:
    kv = KvManager(8, SIZE)
    token_ids = list(range(16))
    filled(kv, token_ids)

    assert hits(kv, token_ids[:num_tokens]) == (num_tokens - 1) // SIZE


def test_equal_blocks_after_different_prefixes_are_different() -> None:
    kv = KvManager(8, SIZE)
    filled(kv, [1, 2, 3, 4, 5, 6, 7, 8])

    assert hits(kv, [5, 6, 7, 8, 9]) == 0
    assert hits(kv, [9, 9, 9, 9, 5, 6, 7, 8, 9]) == 0


def test_different_salts_share_nothing() -> None:
    kv = KvManager(16, SIZE)
    token_ids = list(range(9))
    filled(kv, token_ids, salt="a")

    assert hits(kv, token_ids, salt="a") == 2
    assert hits(kv, token_ids, salt="b") == hits(kv, token_ids, salt="") == hits(kv, token_ids) == 0
    filled(kv, token_ids)
    assert hits(kv, token_ids, salt="") == 0


def test_only_computed_blocks_are_published() -> None:
    kv = KvManager(8, SIZE)
    token_ids = list(range(12))
    table = kv.new_table()
    kv.allocate(table, 3)

    for num_computed in range(13):
        kv.publish(table, token_ids, num_computed)
        assert hits(kv, [*token_ids, 99]) == num_computed // SIZE
        kv.check_invariants()


def test_without_prefix_caching_nothing_is_found_or_counted_and_everything_returns_to_the_free_list() -> None:
    kv = KvManager(8, SIZE, enable_prefix_caching=False)
    table = filled(kv, list(range(9)))
    assert hits(kv, list(range(9))) == 0

    kv.release(table)

    kv.check_invariants()
    assert (kv.num_available, kv.usage, kv.num_query_tokens) == (8, 0.0, 0)


def test_a_hit_keeps_blocks_alive_after_their_first_holder_is_gone() -> None:
    kv = KvManager(4, SIZE)
    token_ids = list(range(9))
    first = filled(kv, token_ids)
    second = filled(kv, token_ids)
    shared = second.blocks[:2]
    assert shared == first.blocks[:2]

    kv.release(first)
    kv.check_invariants()
    others = kv.new_table()
    assert not kv.can_allocate(2)
    assert kv.can_allocate(1)
    assert set(kv.allocate(others, 1)).isdisjoint(second.blocks)


def test_adopting_evictable_blocks_leaves_fewer_to_allocate() -> None:
    kv = KvManager(4, SIZE)
    token_ids = list(range(12))
    kv.release(filled(kv, token_ids))
    table = kv.new_table()
    prefix = kv.cached_prefix(table, [*token_ids, 99])

    assert kv.can_allocate(1, adopting=prefix)
    assert not kv.can_allocate(2, adopting=prefix)
    assert not kv.can_allocate(1, adopting=prefix, spare=1)
    assert kv.can_allocate(4)


def test_the_least_recently_used_content_is_evicted_first_and_its_beginning_last() -> None:
    kv = KvManager(6, SIZE)
    old, new = list(range(12)), list(range(50, 62))
    old_table, new_table = filled(kv, old), filled(kv, new)
    kv.release(old_table)
    kv.release(new_table)

    for old_left, new_left in [(2, 3), (1, 3), (0, 3), (0, 2), (0, 1), (0, 0)]:
        kv.allocate(kv.new_table(), 1)
        kv.check_invariants()
        assert (hits(kv, [*old, 99]), hits(kv, [*new, 99])) == (old_left, new_left)


def test_a_hit_makes_content_recently_used() -> None:
    kv = KvManager(4, SIZE)
    old, new = list(range(8)), list(range(50, 58))
    for each in [filled(kv, old), filled(kv, new)]:
        kv.release(each)
    kv.release(filled(kv, old))

    kv.allocate(kv.new_table(), 2)

    assert (hits(kv, [*old, 99]), hits(kv, [*new, 99])) == (2, 0)


def test_free_blocks_are_used_before_cached_content_is_evicted() -> None:
    kv = KvManager(4, SIZE)
    token_ids = list(range(8))
    kv.release(filled(kv, token_ids))

    kv.allocate(kv.new_table(), 2)

    assert hits(kv, [*token_ids, 99]) == 2


def test_a_block_released_in_a_step_stays_closed_until_the_step_ends() -> None:
    kv = KvManager(4, SIZE)
    table = kv.new_table()
    kv.allocate(table, 3)
    kv.begin_step()
    kv.release(table)

    kv.check_invariants()
    assert kv.num_available == 1
    assert not kv.can_allocate(2)
    kv.end_step()
    kv.check_invariants()
    assert kv.num_available == 4


def test_published_content_can_be_adopted_while_its_block_is_deferred() -> None:
    kv = KvManager(4, SIZE)
    token_ids = list(range(9))
    table = filled(kv, token_ids)
    kv.begin_step()
    kv.release(table)

    other = filled(kv, token_ids)
    kv.end_step()

    kv.check_invariants()
    assert kv.num_available == 1
    kv.release(other)
    assert kv.num_available == 4


def test_content_computed_twice_is_published_once() -> None:
    kv = KvManager(8, SIZE)
    token_ids = list(range(8))
    tables = [kv.new_table(), kv.new_table()]
    for table in tables:
        kv.allocate(table, 2)
    for table in tables:
        kv.publish(table, token_ids, 8)
        kv.check_invariants()

    kv.release(tables[1])
    kv.check_invariants()
    assert kv.cached_prefix(kv.new_table(), [*token_ids, 9]) == tables[0].blocks


def test_queries_and_hits_count_tokens() -> None:
    kv = KvManager(8, SIZE)
    filled(kv, list(range(10)))
    filled(kv, list(range(10)))

    assert (kv.num_query_tokens, kv.num_hit_tokens) == (20, 8)


def test_usage_counts_what_is_held_and_not_what_is_merely_cached() -> None:
    kv = KvManager(8, SIZE)
    table = filled(kv, list(range(8)))
    assert kv.usage == 0.25
    kv.release(table)
    assert kv.usage == 0.0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_random_use_matches_a_plain_model_of_the_pool(seed: int, caching: bool) -> None:
    """Oracle: sets. A block is open when no table holds it and it was not dropped in the current step."""
    rng = random.Random(seed)
    kv = KvManager(12, 2, enable_prefix_caching=caching)
    tables: list[tuple[SequenceBlocks, list[int]]] = []
    content: dict[int, tuple[int, ...]] = {}  # what each block holds, its whole prefix included
    closed: set[int] = set()
    in_step = False
    for _ in range(400):
        held = {block for table, _ in tables for block in table.blocks}
        assert kv.num_available == 12 - len(held | closed)
        kind = rng.random()
        if kind < 0.5:
            token_ids = [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
            table = kv.new_table()
            prefix = kv.cached_prefix(table, token_ids)
            assert [content[block] for block in prefix] == [
                tuple(token_ids[: 2 * i + 2]) for i in range(len(prefix))
            ]
            missing = kv.blocks_for(len(token_ids)) - len(prefix)
            if kv.can_allocate(missing, adopting=prefix):
                kv.adopt(table, prefix, num_queried=len(token_ids))
                new = kv.allocate(table, missing)
                assert not (held | closed) & set(new)
                for i, block in enumerate(table.blocks):
                    content[block] = tuple(token_ids[: 2 * i + 2])
                closed -= set(prefix)
                kv.publish(table, token_ids, rng.randrange(len(token_ids) + 1))
                tables.append((table, token_ids))
            else:
                assert missing + len(set(prefix) - held - closed) > 12 - len(held | closed)
        elif kind < 0.8 and tables:
            table, token_ids = tables.pop(rng.randrange(len(tables)))
            gone = set(table.blocks) - {block for other, _ in tables for block in other.blocks}
            kv.release(table)
            closed |= gone if in_step else set()
        elif in_step:
            kv.end_step()
            closed, in_step = set(), False
        else:
            kv.begin_step()
            in_step = True
        kv.check_invariants()


def test_without_a_cache_churn_writes_no_more_blocks_than_are_ever_held_at_once() -> None:
    """Blocks that were never used cost no memory, so those freed last are used first."""
    rng = random.Random(0)
    kv = KvManager(1000, SIZE, enable_prefix_caching=False)
    held: list[SequenceBlocks] = []
    used: set[int] = set()
    most = 0
    for _ in range(500):
        table = kv.new_table()
        used |= set(kv.allocate(table, rng.randint(1, 5)))
        held.append(table)
        most = max(most, kv.num_blocks - kv.num_available)
        if len(held) == 4:
            kv.release(held.pop(rng.randrange(4)))
    assert len(used) == most <= 20


def test_cached_content_stays_as_long_as_there_are_blocks_that_were_never_used() -> None:
    kv = KvManager(20, SIZE)
    first = list(range(8))
    kv.release(filled(kv, first))
    for number in range(1, 9):
        kv.release(filled(kv, [100 * number + i for i in range(8)]))
        assert hits(kv, [*first, 99]) == 2
