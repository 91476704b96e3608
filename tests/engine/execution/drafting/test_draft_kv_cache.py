"""What DraftKvCache takes for computed, with block tables made by hand. test_draft_model.py checks the content.

Planted bugs that these tests have caught: digests of their own block only; accepted tokens counted twice; a block
marked before it is full; unverified tokens that begin one too late; fed tokens kept after a disagreement.
"""

import pytest

from faser.engine.execution.drafting.draft_model import DraftKvCache
from faser.engine.execution.runner.batch import BlockTable

SIZE = 4
A, B, C = (tuple(range(first, first + SIZE)) for first in (10, 20, 30))  # contents of three blocks


def make(tables: dict[int, tuple[int, ...]]) -> DraftKvCache:
    table = BlockTable(4, 8)
    for slot, blocks in tables.items():
        table.append(slot, blocks)
    return DraftKvCache(table, num_blocks=16, block_size=SIZE)


def fill(kv: DraftKvCache, slot: int, token_ids: tuple[int, ...], fed: tuple[int, ...] = ()) -> int:
    """Start a sequence and let its cache be computed. Returns where that began."""
    kv.start(slot, token_ids)
    start = kv.missing(slot, 2).start
    kv.fill(slot, fed)
    kv.check_invariants()
    return start


def test_a_block_counts_only_behind_the_beginning_it_was_computed_with() -> None:
    """Slot 2's two blocks hold the right tokens, but the second one was computed after another first block."""
    kv = make({0: (5, 9), 1: (7, 6, 9), 2: (5, 6, 8)})
    assert fill(kv, 0, (*A, 1)) == 0
    assert fill(kv, 1, (*C, *B, 1)) == 0
    kv.release(1)
    assert fill(kv, 2, (*A, *B, 1)) == SIZE


def test_blocks_that_others_computed_are_taken_over_up_to_the_first_difference() -> None:
    kv = make({0: (1, 2, 3, 4), 1: (1, 2, 5, 6)})
    assert fill(kv, 0, (*A, *B, *C, 1)) == 0
    assert fill(kv, 1, (*A, *B, *A, 1)) == 2 * SIZE


def test_a_whole_prompt_that_is_there_is_opened_at_its_last_token() -> None:
    kv = make({0: (1, 2, 3), 1: (1, 2, 3)})
    assert fill(kv, 0, (*A, *B, 1)) == 0
    kv.release(0)
    assert fill(kv, 1, (*A, *B)) == 2 * SIZE - 1


def test_drafted_tokens_that_were_accepted_stay_and_are_counted_once() -> None:
    kv = make({0: (1, 2, 3, 4)})
    fill(kv, 0, A, fed=(7, 8))
    kv.extend(0, (7, 5))  # 8 was refused
    kv.extend(0, (7, 8))  # as drafted before, but not by the latest draft
    missing = kv.missing(0, 1)
    assert missing.start == SIZE + 1
    assert tuple(missing.token_ids) == (5, 7, 8)


def test_a_block_filled_with_accepted_drafts_is_marked_and_one_with_refused_ones_is_not() -> None:
    kv = make({0: (1, 2, 3), 1: (1, 2, 3), 2: (1, 2, 3)})
    fill(kv, 0, (*A, *B[:2]), fed=B[2:])
    kv.extend(0, (*B, 1)[2:])
    kv.check_invariants()
    kv.release(0)
    assert fill(kv, 1, (*A, *B, 5)) == 2 * SIZE
    kv.release(1)

    kv = make({0: (1, 2, 3), 1: (1, 2, 3)})
    fill(kv, 0, (*A, *B[:2]), fed=(99, 98))
    kv.extend(0, B[2:])
    kv.release(0)
    assert fill(kv, 1, (*A, *B, 5)) == SIZE


def test_tokens_behind_open_after_what_was_fed_of_them() -> None:
    """Fed 7 8 and half of the next draft, 9; the one that was drafted last never is. At least one row remains."""
    kv = make({0: (1, 2, 3, 4)})
    fill(kv, 0, A, fed=(7, 8, 9))
    assert missing_tokens(kv, 0, (7, 8, 9, 6)) == (SIZE + 3, (6,))
    assert missing_tokens(kv, 0, (7, 8, 9)) == (SIZE + 2, (9,))
    assert missing_tokens(kv, 0, (7,)) == (SIZE, (7,))
    assert missing_tokens(kv, 0, (7, 5, 9)) == (SIZE + 1, (5, 9))
    assert missing_tokens(kv, 0, ()) == (SIZE - 1, A[-1:])


def test_what_was_fed_stays_as_long_as_everything_agrees() -> None:
    kv = make({0: (1, 2, 3, 4)})
    fill(kv, 0, A, fed=(7, 8, 9, 6))
    kv.extend(0, (7, 8))
    kv.check_invariants()
    assert missing_tokens(kv, 0, (9, 6, 5)) == (SIZE + 4, (5,))
    kv.extend(0, (4,))  # not the 9
    kv.check_invariants()
    assert missing_tokens(kv, 0, (6, 5)) == (SIZE + 2, (4, 6, 5))


def test_a_block_of_tokens_behind_is_marked_only_when_they_came() -> None:
    kv = make({0: (1, 2, 3), 1: (1, 2, 3), 2: (1, 2, 3)})
    fill(kv, 0, (*A, 1))
    kv.missing(0, 2, B)
    kv.fill(0, (*B, 5))
    kv.check_invariants()
    kv.start(1, (*A, 1, *B))
    assert kv.missing(1, 2).start == SIZE, "the second block holds tokens that are not accepted yet"
    kv.release(1)
    kv.extend(0, B)
    kv.check_invariants()
    kv.start(2, (*A, 1, *B, 7))
    assert kv.missing(2, 2).start == 2 * SIZE


def missing_tokens(kv: DraftKvCache, slot: int, unverified: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    missing = kv.missing(slot, 1, unverified)
    return missing.start, tuple(missing.token_ids)


def test_a_slot_that_is_free_already_can_be_released() -> None:
    """Slots of sequences that no request ever concerned are released like all others."""
    kv = make({})
    kv.release(3)
    kv.check_invariants()
    with pytest.raises(KeyError):
        kv.num_known(3)


def test_what_is_held_before_the_first_draft_is_what_the_first_draft_finds() -> None:
    kv = make({0: (1, 2, 3, 4), 1: (1, 2, 5, 6), 2: (8, 9)})
    fill(kv, 0, (*A, *B, *C, 1))
    for slot, token_ids in ((1, (*A, *B, *A, 1)), (2, (*A, 1))):
        kv.start(slot, token_ids)
    held = [kv.num_held(1), kv.num_held(2)]
    assert held == [2 * SIZE, 0]
    assert [kv.missing(1, 2).start, kv.missing(2, 2).start] == held
