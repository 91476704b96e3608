"""What is known of sequences by slot. Oracle: every sequence looked at by itself."""

from dataclasses import replace

import numpy as np

from faser.engine.control.sequences.kv_cache import SequenceBlocks
from faser.engine.control.sequences.sequence import Sequence
from faser.engine.control.speculation.state import SequenceStates
from faser.engine.control.timing.clock import SimulatedClock
from faser.types import FinishReason, Slo, SpeculationParams
from tests.engine.driving import request

CAP = 4


def sequence_in(
    slot: int, *, prompt: int = 5, max_tokens: int = 20, most: int | None = None, tpot_ms: float | None = None
) -> Sequence:
    requests = SpeculationParams(max_tokens=most, slo=Slo(tpot_ms=tpot_ms))
    found = Sequence(
        replace(request(f"r{slot}", [1] * prompt, max_tokens=max_tokens), speculation=requests),
        0,
        priority_key=(0, 0.0, slot),
        seed=0,
        table=SequenceBlocks(b""),
        max_total=prompt + max_tokens,
        eos_token_ids=frozenset(),
    )
    found.slot = slot
    return found


def roster_of(*sequences: Sequence, clock: SimulatedClock | None = None) -> SequenceStates:
    roster = SequenceStates(8, CAP, clock or SimulatedClock())
    for each in sequences:
        roster.start(each)
    return roster


def test_a_batch_says_of_each_sequence_what_it_may_and_what_is_left() -> None:
    sequences = [sequence_in(3, prompt=5, max_tokens=9), sequence_in(1, prompt=2, max_tokens=3, most=2)]
    batch = roster_of(*sequences).batch(sequences)
    assert batch.slots.tolist() == [3, 1]
    assert batch.caps.tolist() == [CAP, 2]
    assert batch.known.tolist() == [5, 2]
    assert batch.left.tolist() == [each.max_total - 1 - each.num_tokens for each in sequences]
    assert batch.kv_tokens == 7


def test_the_same_batch_is_seen_to_grow() -> None:
    sequences = [sequence_in(0), sequence_in(1)]
    roster = roster_of(*sequences)
    before = roster.batch(sequences)
    sequences[1].token_ids.extend([7, 7])
    after = roster.batch([*sequences])
    assert after.slots is before.slots
    assert (after.known - before.known).tolist() == [0, 2]
    assert (after.left - before.left).tolist() == [0, -2]


def test_another_order_and_another_slot_are_another_batch() -> None:
    one, two = sequence_in(0), sequence_in(1, most=1)
    roster = roster_of(one, two)
    assert roster.batch([one, two]).caps.tolist() == [CAP, 1]
    assert roster.batch([two, one]).caps.tolist() == [1, CAP]
    two.slot = 5  # preempted, and admitted again
    roster.release(two)
    roster.start(two)
    assert roster.batch([two, one]).slots.tolist() == [5, 0]


def test_an_answer_is_expected_to_go_on_for_the_usual_length_at_most() -> None:
    running, short, long = (sequence_in(slot, max_tokens=50) for slot in range(3))
    roster = roster_of(running, short, long)
    batch = roster.batch([running])
    assert roster.expected(batch).tolist() == batch.left.tolist() == [49]
    roster.release(short)  # preempted: says nothing
    assert roster.expected(batch).tolist() == [49]
    for ended, length in ((short, 10), (long, 30)):
        ended.token_ids.extend([7] * length)
        ended.finish_reason = FinishReason.STOP
        roster.release(ended)
    assert roster.expected(batch).tolist() == [20]
    running.token_ids.extend([7] * 45)
    assert roster.expected(roster.batch([running])).tolist() == [4]


def test_lag_is_what_a_draft_model_has_not_seen() -> None:
    sequences = [sequence_in(0, prompt=6), sequence_in(2, prompt=9)]
    roster = roster_of(*sequences)
    roster.covers(np.array([0, 2]), np.array([4, 9]))
    assert roster.lag(roster.batch(sequences)).tolist() == [2, 0]
    roster.covers_upto(np.array([0]), [6])
    assert roster.lag(roster.batch(sequences)).tolist() == [0, 0]


def test_weights_are_one_but_for_who_is_behind_a_target() -> None:
    clock = SimulatedClock()
    late, early, free = sequence_in(0, tpot_ms=10.0), sequence_in(1, tpot_ms=1000.0), sequence_in(2)
    roster = roster_of(late, early, free, clock=clock)
    sequences = [late, early, free]
    assert roster.weights(roster.batch(sequences)).tolist() == [1.0, 1.0, 1.0]
    clock.advance(0.04)
    for each in sequences:
        each.token_ids.extend([7, 7])
    assert np.allclose(roster.weights(roster.batch(sequences)), [(0.04 / 0.02) ** 2, 1.0, 1.0])
    assert roster.weights(roster.batch([free])).tolist() == [1.0]
