"""What is known of sequences by slot, and how long a decision serves. Oracle: each sequence by itself."""

import numpy as np
import pytest

from faser.engine.contract.drafts import table_of
from faser.engine.control.clock import SimulatedClock
from faser.engine.control.sequence import Sequence
from faser.engine.control.speculation.policy import Candidates
from faser.engine.control.speculation.state import CachedDecision, SpeculationState
from faser.types.answer import FinishReason
from tests.engine.control.speculation.building import candidates, full, ints, sequence_in

CAP, NUM_SLOTS = 4, 80


def state_of(*sequences: Sequence, clock: SimulatedClock | None = None) -> SpeculationState:
    state = SpeculationState(NUM_SLOTS, CAP, clock or SimulatedClock())
    for each in sequences:
        state.start(each)
    return state


def test_a_batch_has_the_cap_and_the_remaining_tokens_of_each_sequence() -> None:
    sequences = [sequence_in(3, prompt=5, max_tokens=9), sequence_in(1, prompt=2, max_tokens=3, most=2)]
    batch = state_of(*sequences).batch(sequences)
    assert batch.slots.tolist() == [3, 1]
    assert batch.caps.tolist() == [CAP, 2]
    assert batch.known.tolist() == [5, 2]
    assert batch.remaining.tolist() == [each.max_total - 1 - each.num_tokens for each in sequences]
    assert batch.kv_tokens == 7


def test_the_same_batch_is_seen_to_grow() -> None:
    sequences = [sequence_in(0), sequence_in(1)]
    state = state_of(*sequences)
    before = state.batch(sequences)
    sequences[1].token_ids.extend([7, 7])
    after = state.batch([*sequences])
    assert after.slots is before.slots
    assert (after.known - before.known).tolist() == [0, 2]
    assert (after.remaining - before.remaining).tolist() == [0, -2]


def test_another_order_and_another_slot_are_another_batch() -> None:
    one, two = sequence_in(0), sequence_in(1, most=1)
    state = state_of(one, two)
    assert state.batch([one, two]).caps.tolist() == [CAP, 1]
    assert state.batch([two, one]).caps.tolist() == [1, CAP]
    two.slot = 5  # preempted, and admitted again
    state.release(two)
    state.start(two)
    assert state.batch([two, one]).slots.tolist() == [5, 0]


def test_an_answer_is_expected_to_go_on_for_the_mean_length_at_most() -> None:
    running, short, long = (sequence_in(slot, max_tokens=50) for slot in range(3))
    state = state_of(running, short, long)
    batch = state.batch([running])
    assert state.expected_tokens(batch).tolist() == batch.remaining.tolist() == [49]
    state.release(short)  # preempted: its length teaches nothing
    assert state.expected_tokens(batch).tolist() == [49]
    for ended, length in ((short, 10), (long, 30)):
        ended.token_ids.extend([7] * length)
        ended.finish_reason = FinishReason.STOP
        state.release(ended)
    assert state.expected_tokens(batch).tolist() == [20]
    running.token_ids.extend([7] * 45)
    assert state.expected_tokens(state.batch([running])).tolist() == [4]


def test_missing_kv_is_what_the_draft_kv_cache_does_not_hold() -> None:
    sequences = [sequence_in(0, prompt=6), sequence_in(2, prompt=9)]
    state = state_of(*sequences)
    state.extend_draft_kv(ints(0, 2), ints(4, 9))
    assert state.missing_kv(state.batch(sequences)).tolist() == [2, 0]
    state.set_draft_kv(ints(0), [6])
    assert state.missing_kv(state.batch(sequences)).tolist() == [0, 0]


def test_a_sequence_lacks_the_tokens_of_its_targets_time_that_it_has_not_got() -> None:
    clock = SimulatedClock()
    late, early, free = sequence_in(0, tpot_ms=10.0), sequence_in(1, tpot_ms=1000.0), sequence_in(2)
    state = state_of(late, early, free, clock=clock)
    sequences = [late, early, free]
    assert state.lacking(state.batch(sequences))[0].tolist() == [0.0, 0.0, -np.inf]
    clock.advance(0.04)
    for each in sequences:
        each.token_ids.extend([7, 7])
    lacking, wanted_per_s = state.lacking(state.batch(sequences))
    assert lacking == pytest.approx([4.0 - 2.0, 0.04 - 2.0, -np.inf])
    assert wanted_per_s.tolist() == [100.0, 1.0, 0.0]
    lacking, wanted_per_s = state.lacking(state.batch([free]))
    assert (lacking.tolist(), wanted_per_s.tolist()) == ([-np.inf], [0.0])


@pytest.mark.parametrize("leaves", [True, False])
def test_an_overlapped_draft_goes_with_the_sequence_of_its_slot(leaves: bool) -> None:
    sequence = sequence_in(1)
    state = state_of(sequence)
    draft = table_of([1], "suffix", [(3, 4)], [(1.0, 1.0)], width=CAP)
    state.frontiers.learn(draft, {}, {1: (3,)})
    assert state.frontiers.standing(ints(1))[0].tolist() == [0]
    (state.release if leaves else state.start)(sequence)
    assert not len(state.frontiers.standing(ints(1))[0])


def candidates_of(count: int) -> Candidates:
    survival = np.linspace(1, 0.2, CAP + 1) ** np.linspace(1, 2, count)[:, None]
    return candidates(survival, kv_tokens=count)


def steps_served(state: SpeculationState, count: int) -> list[CachedDecision]:
    """Make a decision for count sequences; what serves the steps after it."""
    assert state.cached_decision(count, is_due=False) is None
    state.cache_decision(candidates_of(count), np.arange(count) % (CAP + 1), None, count)
    found = []
    while (decision := state.cached_decision(count, is_due=False)) is not None:
        found.append(decision)
    return found


def state_with_decision() -> SpeculationState:
    """For 32 sequences, which draft 3 tokens each."""
    state = state_of()
    state.cache_decision(candidates_of(32), full(32, 3), None, 32)
    return state


@pytest.mark.parametrize("count, steps", [(1, 0), (11, 0), (12, 1), (40, 3), (48, 4), (64, 5)])
def test_the_more_sequences_the_longer_a_decision_serves(count: int, steps: int) -> None:
    assert len(steps_served(state_of(), count)) == steps


@pytest.mark.parametrize("count", [1, 15, 64])
def test_a_decision_to_look_up_text_serves_small_batches_too(count: int) -> None:
    assert len(steps_served(SpeculationState(NUM_SLOTS, CAP, SimulatedClock(), looks_up=True), count)) == 3


def test_a_cached_decision_is_the_one_that_was_made() -> None:
    decision = steps_served(state_of(), 32)[0]
    assert decision.lengths[:32].tolist() == [i % (CAP + 1) for i in range(32)]
    assert (decision.survival[:32] == candidates_of(32).survival).all()
    assert decision.usual == round(sum(i % (CAP + 1) for i in range(32)) / 32)
    assert set(decision.lengths[32:].tolist()) == {decision.usual}


def test_a_sequence_that_starts_later_drafts_the_usual_length() -> None:
    state = state_of()
    state.cache_decision(candidates_of(32), np.arange(32) % 3, None, 32)
    state.start(sequence_in(5))
    state.start(sequence_in(40))
    decision = state.cached_decision(33, is_due=False)
    assert decision is not None
    assert decision.lengths[[5, 40]].tolist() == [1, 1]


@pytest.mark.parametrize("count, serves", [(32, True), (34, True), (30, False), (40, False)])
def test_a_decision_ends_when_many_sequences_start_or_leave(count: int, serves: bool) -> None:
    assert (state_with_decision().cached_decision(count, is_due=False) is not None) == serves


def test_a_decision_ends_when_a_new_one_is_due_anyway_or_the_policy_changes() -> None:
    assert state_with_decision().cached_decision(32, is_due=True) is None
    state = state_with_decision()
    state.drop_decision()
    assert state.cached_decision(32, is_due=False) is None


def test_a_decision_expires_with_the_last_step_that_it_serves() -> None:
    state = state_with_decision()
    expired = []
    while state.cached_decision(32, is_due=False) is not None:
        expired.append(state.decision_expired)
    assert expired == [False, True]
    state = state_with_decision()
    state.expire_decision()
    assert state.decision_expired


def test_what_the_target_has_in_its_prefix_cache_the_draft_model_may_lack() -> None:
    """Planted bug: a prefix hit of the target counted as one of the draft model."""
    sequence = sequence_in(0, prompt=50)
    sequence.num_computed = 48
    state = state_of(sequence)
    assert state.missing_kv(state.batch([sequence])).tolist() == [50]
    state.set_draft_kv(0, 32)
    assert state.missing_kv(state.batch([sequence])).tolist() == [18]


def test_a_drafter_without_a_kv_cache_of_its_own_misses_nothing() -> None:
    sequence = sequence_in(0, prompt=50)
    state = SpeculationState(NUM_SLOTS, CAP, SimulatedClock(), catches_up=False)
    state.start(sequence)
    assert state.missing_kv(state.batch([sequence])).tolist() == [0]


def test_a_head_reads_the_latest_tokens_only() -> None:
    """What it will never read is not counted as missing again."""
    state = SpeculationState(NUM_SLOTS, CAP, SimulatedClock(), most_missing=20)
    sequence = sequence_in(1, prompt=50)
    state.start(sequence)
    assert state.missing_kv(state.batch([sequence])).tolist() == [20]
    state.extend_draft_kv(ints(1), ints(20))
    assert state.missing_kv(state.batch([sequence])).tolist() == [0]


def test_a_preempted_sequence_keeps_the_debt_to_its_target() -> None:
    """Two tokens took 0.08 s where 0.04 s was the target; then it waits for a second, in another slot."""
    clock = SimulatedClock()
    sequence = sequence_in(0, tpot_ms=20.0)
    state = state_of(sequence, clock=clock)
    state.lacking(state.batch([sequence]))
    clock.advance(0.08)
    sequence.token_ids.extend([1, 1])
    assert state.lacking(state.batch([sequence]))[0] == pytest.approx([2.0])
    state.release(sequence)
    clock.advance(0.02)
    sequence.slot = 3
    state.start(sequence)
    assert state.lacking(state.batch([sequence]))[0] == pytest.approx([3.0])
