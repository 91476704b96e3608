"""The ring of states: what each slot finds there is the state of its own committed positions, or nothing.

Oracle: a dictionary from slot and position to the row that was written last for it. Planted bugs that these tests
have caught: states of refused draft tokens are kept; rows that were overwritten count as there.
"""

import random

import pytest
import torch

from faser.engine.contract.plan import SequenceRows, StepRows
from faser.engine.execution.drafting.head_memory import HiddenStates, ring_rows

NUM_SLOTS, WIDTH, MOST_EACH = 3, 2, 12


def make_ring(num_rows: int, most_each: int = MOST_EACH) -> HiddenStates:
    return HiddenStates(
        num_slots=NUM_SLOTS,
        num_rows=num_rows,
        width=WIDTH,
        dtype=torch.float32,
        device=torch.device("cpu"),
        most_each=most_each,
    )


def rows_of(slot: int, start: int, count: int, num_drafts: int = 0) -> SequenceRows:
    return SequenceRows(
        slot=slot,
        start=start,
        token_ids=tuple(range(count)),
        new_blocks=(),
        samples=True,
        num_drafts=num_drafts,
    )


def found(ring: HiddenStates, slot: int, first: int) -> dict[int, float]:
    """By position, the first number of the state that the ring has."""
    pieces = ring.pieces(slot, first)
    if not pieces:
        return {}
    values = iter(ring.gather(pieces)[:, 0].tolist())
    return {position: next(values) for each in pieces for position in range(each.position, each.end)}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_rows", [8, 19, 200])
def test_a_slot_finds_the_states_of_its_committed_positions(seed: int, num_rows: int) -> None:
    rng, ring = random.Random(seed), make_ring(num_rows)
    length: dict[int, int] = {}
    kept: dict[tuple[int, int], tuple[float, int]] = {}  # the value, and the number of its row
    written, value = 0, 0.0
    for _ in range(200):
        for slot in range(NUM_SLOTS):
            if slot not in length and rng.random() < 0.3:
                length[slot] = rng.randrange(4)  # a prefix that was computed before
                ring.start(slot)
            elif slot in length and rng.random() < 0.05:
                del length[slot]
                ring.release(slot)
                kept = {key: each for key, each in kept.items() if key[0] != slot}
        batch, query_start, num_tokens = [], [], {}
        values: list[float] = []
        for slot in length:
            count = rng.randint(1, 4)
            drafts = rng.randrange(count)
            batch.append(rows_of(slot, length[slot], count, drafts))
            query_start.append(len(values))
            accepted = rng.randint(0, drafts)
            num_tokens[slot] = accepted + 1
            values += [value + i for i in range(count)]
            value += count
        if not batch or len(values) > num_rows:
            continue
        if written % num_rows + len(values) > num_rows:
            written += num_rows - written % num_rows
        for rows, start in zip(batch, query_start, strict=True):
            committed = len(rows.token_ids) - rows.num_drafts + num_tokens[rows.slot] - 1
            for i in range(committed):
                kept[rows.slot, rows.start + i] = (values[start + i], written + start + i)
            length[rows.slot] += committed
        counts = [num_tokens[rows.slot] for rows in batch]
        ring.take_in(StepRows.of(*batch), query_start, torch.tensor(values)[:, None].expand(-1, WIDTH), counts)
        written += len(values)
        ring.check_invariants()
        slot = rng.choice([*length])
        first = rng.randrange(length[slot] + 2)
        there = {
            position: each
            for (of, position), (each, row) in kept.items()
            if of == slot and position >= first and row >= written - num_rows
        }
        got = found(ring, slot, first)
        assert got.items() <= there.items()
        assert {each for each in there if each >= length[slot] - MOST_EACH} <= got.keys()
        if got and rng.random() < 0.3:
            ring.forget(slot, max(got))
            assert found(ring, slot, 0).keys() == {max(got)}
            kept = {key: each for key, each in kept.items() if key[0] != slot or key[1] >= max(got)}


def test_rows_of_one_sequence_alone_are_one_view_of_the_ring() -> None:
    ring = make_ring(32)
    ring.start(0)
    for start in range(0, 9, 3):
        ring.take_in(StepRows.of(rows_of(0, start, 3)), [0], torch.full((3, WIDTH), float(start)), [1])
    (piece,) = ring.pieces(0, 0)
    assert (piece.position, piece.end) == (0, 9)
    assert ring.gather([piece]).data_ptr() == ring.gather([piece]).data_ptr(), "nothing is copied"


def test_only_slots_that_may_draft_want_states() -> None:
    ring = make_ring(32)
    ring.start(1)
    assert not ring.wants([0])
    assert ring.wants([0, 1])
    ring.release(1)
    assert not ring.wants([1])


def test_a_ring_has_room_for_two_steps_whatever_its_share_of_memory() -> None:
    assert ring_rows(1728, torch.bfloat16, max_rows=256, on_gpu=False) == (64 << 20) // 3456
    assert ring_rows(1 << 20, torch.float32, max_rows=8192, on_gpu=True) == 16384
