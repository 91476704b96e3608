"""Views of the target's blocks, and the states that a head keeps at the end of each.

tests/engine/execution/drafting/heads/test_head_drafter.py and test_block.py check what heads draft from them.
"""

import pytest
import torch

from faser.engine.contract.plan import SequenceRows, StepRows
from faser.engine.execution.drafting.head_memory import UNKNOWN, BlockViews, HeadCache, HiddenStates, StatePiece
from faser.engine.execution.runner.batch import BlockTable

NUM_SLOTS, NUM_BLOCKS, BLOCK_SIZE, WIDTH = 3, 10, 4, 2


def make_table() -> BlockTable:
    table = BlockTable(NUM_SLOTS, 6)
    table.append(0, (1, 2, 3, 4))
    table.append(1, (1, 2, 5))
    table.append(2, (7,))
    return table


def make_cache() -> tuple[HeadCache, HiddenStates]:
    ring = HiddenStates(
        num_slots=NUM_SLOTS, num_rows=40, width=WIDTH, dtype=torch.float32, device=torch.device("cpu")
    )
    return HeadCache(make_table(), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE), ring


def capture(ring: HiddenStates, slot: int, start: int, count: int) -> None:
    """States whose first number is their position."""
    rows = SequenceRows(slot=slot, start=start, token_ids=(0,) * count, new_blocks=(), samples=False)
    states = torch.arange(start, start + count, dtype=torch.float32)[:, None].expand(-1, WIDTH)
    ring.take_in(StepRows.of(rows), [0], states, [0])


def read(cache: HeadCache, ring: HiddenStates, slot: int, last: int) -> list[float]:
    """Fill the cache up to this position; returns the states that it reads, 0 where they are unknown."""
    begin = cache.begin(slot, last)
    pieces = ring.pieces(slot, begin)
    if (first := pieces[0].position) > begin:
        pieces = [*cache.leave_out(slot, first), *pieces]
    cache.write(slot, pieces[0].position)
    cache.fill(slot, pieces)
    cache.check_invariants()
    return ring.gather(pieces)[:, 0].tolist()


def started(*slots: int) -> tuple[HeadCache, HiddenStates]:
    cache, ring = make_cache()
    for slot in slots:
        cache.start(slot, range(12))
        ring.start(slot)
    return cache, ring


def test_a_view_leaves_out_the_first_blocks_of_a_slot() -> None:
    table = make_table()
    views = BlockViews(table)
    assert views.of([0, 1]).tolist() == [[1, 2, 3, 4], [1, 2, 5, 0]]
    views.leave_out(0, 2)
    assert views.blocks(0) == [3, 4]
    assert views.blocks(0, 1) == [4]
    found = views.of([0, 1, 2])
    assert found[0, :2].tolist() == [3, 4]
    assert found[1, :3].tolist() == [1, 2, 5]
    assert found[2, :1].tolist() == [7]
    table.append(0, (8,))
    assert views.blocks(0) == [3, 4, 8]


def test_rows_of_a_prefix_are_there_for_the_next_sequence() -> None:
    cache, ring = started(0, 1)
    capture(ring, 0, 0, 11)
    assert read(cache, ring, 0, 10) == [*range(11)]
    capture(ring, 1, 8, 3)
    assert read(cache, ring, 1, 10) == [8, 9, 10]
    assert cache.table.first(1) == 0
    cache.start(2, [*range(4), 9, 9, 9, 9])
    assert cache.begin(2, 3) == 0, "its block has another content, and the second one is still to come"


def test_a_block_counts_once_it_is_full() -> None:
    cache, ring = started(0, 1)
    capture(ring, 0, 0, 7)
    read(cache, ring, 0, 6)
    assert cache.begin(1, 11) == 4
    cache.release(1)
    capture(ring, 0, 7, 1)
    read(cache, ring, 0, 7)
    cache.start(1, range(12))
    assert cache.begin(1, 11) == 8


def test_rows_that_are_written_again_count_no_more() -> None:
    cache, ring = started(0, 1)
    capture(ring, 0, 0, 11)
    read(cache, ring, 0, 10)
    cache.write(0, 5)
    assert cache.begin(1, 11) == 4


def test_a_sequence_whose_prefix_nobody_read_begins_with_its_own_states() -> None:
    cache, ring = started(1)
    capture(ring, 1, 8, 3)
    assert read(cache, ring, 1, 10) == [8, 9, 10]
    assert (cache.table.first(1), cache.place(1, 8), cache.room(1)) == (2, 0, 12)
    assert [each.position for each in cache.own_rows(1)] == [8]
    cache.start(0, range(12))
    assert cache.begin(0, 11) == 0, "its rows are for itself"
    cache.release(1)
    cache.start(1, range(12))
    assert cache.table.first(1) == 0


@pytest.mark.parametrize("lost", [2, 9])
def test_states_that_are_missing_leave_out_the_blocks_before(lost: int) -> None:
    """In the first block there are none to leave out, but its rows are for the sequence alone too."""
    cache, ring = started(0)
    capture(ring, 0, 0, 1)
    read(cache, ring, 0, 0)
    ring.forget(0, 1)
    capture(ring, 0, lost, 3)
    begin = lost // BLOCK_SIZE * BLOCK_SIZE
    assert read(cache, ring, 0, lost + 2) == [0.0] * (lost - begin) + [lost, lost + 1, lost + 2]
    (unknown, _) = cache.own_rows(0)
    assert unknown == StatePiece(UNKNOWN, begin, lost - begin)
    assert ring.are_there(cache.own_rows(0))
    assert cache.blocks(0, begin) == ([1, 2] if lost == 2 else [3])
    cache.start(1, range(12))
    assert cache.begin(1, 11) == 0


def test_what_no_sequence_holds_is_distrusted() -> None:
    cache, ring = started(0)
    capture(ring, 0, 0, 11)
    read(cache, ring, 0, 10)
    cache.release(0)
    cache.distrust()
    cache.start(1, range(12))
    assert cache.begin(1, 11) == 0
