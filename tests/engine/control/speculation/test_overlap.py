"""What overlapped drafting brings, and which drafts stand. Oracles: the state machine played out; every choice,
and every run of tokens that a step can sample, tried one by one.
"""

import itertools

import numpy as np
import pytest

from faser.engine.contract.drafts import DraftTable, joined, table_of
from faser.engine.contract.step_times import InterferenceTable, Matrix, StepTimes
from faser.engine.control.speculation.draft_lengths import Objective
from faser.engine.control.speculation.overlap import Frontiers, OverlapChoice, best_overlap, expected
from faser.engine.control.speculation.policy import Candidates
from faser.engine.control.step_cost import CostModel
from tests.engine.control.speculation.building import candidates, constant, ints

LANES = (
    InterferenceTable.constant(share=0.25, verify=1.1, draft=3.0, verify_alone=1.05, draft_alone=2.5),
    InterferenceTable.constant(share=0.5, verify=1.5, draft=1.6, verify_alone=1.4, draft_alone=1.3),
)
COSTS = CostModel(
    StepTimes.proportional(step_s=0.05, row_s=0.002, kv_token_s=1e-7, pass_s=0.01, pass_row_s=0.0004)
)


def played(acceptances: list[float], length: int, steps: int, seed: int) -> tuple[float, float]:
    """Share of ready steps, and tokens a step, where the k-th drafted token is right with acceptances[k]."""
    random = np.random.default_rng(seed)
    chunk: list[bool] = []
    ready = tokens = 0
    for _ in range(steps):
        ready += bool(chunk) or length == 1
        accepted = next((i for i, right in enumerate(chunk) if not right), len(chunk))
        tokens += accepted + 1
        draft = (random.random(length) < acceptances[:length]).tolist()
        chunk = draft[1:] if accepted == len(chunk) and draft[0] else []
    return ready / steps, tokens / steps


@pytest.mark.parametrize(("alpha", "length"), [(0.9, 4), (0.8, 2), (0.6, 5), (0.3, 3)])
def test_a_constant_acceptance_gives_the_closed_form_of_pearl(alpha: float, length: int) -> None:
    ready, tokens = expected(constant(alpha, 1, length))
    pi = alpha / (1 + alpha - alpha**length)
    assert ready[0, length - 1] == pytest.approx(pi)
    mean = (1 - pi) + pi * (1 - alpha**length) / (1 - alpha)
    assert 1 + ready[0, length - 1] * (tokens[0, length - 1] - 1) == pytest.approx(mean)


@pytest.mark.parametrize(("alpha", "length"), [(0.9, 4), (0.8, 2), (0.6, 5), (0.5, 1)])
def test_the_expectation_is_that_of_the_state_machine_played_out(alpha: float, length: int) -> None:
    share, rate = played([alpha] * length, length, 60_000, seed=length)
    ready, tokens = expected(constant(alpha, 1, length))
    assert 1 + ready[0, length - 1] * (tokens[0, length - 1] - 1) == pytest.approx(rate, rel=0.015)
    if length > 1:
        assert ready[0, length - 1] == pytest.approx(share, rel=0.02)


def test_a_sequence_that_never_passes_the_bonus_token_is_never_ready_and_has_one_token() -> None:
    ready, tokens = expected(np.array([[1.0, 0.0, 0.0]]))
    assert ready.tolist() == [[0.0, 0.0]]
    assert tokens.tolist() == [[1.0, 1.0]]


def brute_rate(state: Candidates, chosen: tuple[int, ...], length: int, lanes: InterferenceTable) -> float:
    objective = Objective(COSTS, state)
    worth, rows = objective.worth, 0.0
    for s in chosen:
        most = min(length, int(state.limit[s]))
        survival = state.survival[s, : most + 1]
        ready = survival[1] / (1 + survival[1] - survival[most])
        worth += ready * (sum(survival[1:]) / survival[1] - 1)
        rows += ready * (most - 1)
    draft_s = length * COSTS.pass_s(len(chosen))
    verify_s = objective.verify_s(np.array([round(rows)]))[0]
    step_rows = state.num_sequences + state.step.other_rows + round(rows)
    context = state.step.kv_tokens / state.num_sequences
    return float(worth / lanes.one(verify_s, draft_s, rows=step_rows, context=context))


def drawn(random: np.random.Generator) -> Matrix:
    return tuple(tuple(line) for line in random.uniform(1.2, 1.8, size=(2, 3)).tolist())


def grids(seed: int) -> tuple[InterferenceTable, ...]:
    """Lanes that cost something else in every step."""
    random = np.random.default_rng(seed)
    return tuple(
        InterferenceTable(
            share=share,
            rows=(4, 9, 16),
            contexts=(10, 100),
            verify=drawn(random),
            draft=drawn(random),
            verify_alone=drawn(random),
            draft_alone=drawn(random),
        )
        for share in (0.25, 0.5)
    )


def best(
    state: Candidates,
    lanes: tuple[InterferenceTable, ...],
    costs: CostModel = COSTS,
    most_rows: int | None = None,
) -> OverlapChoice:
    found = best_overlap(state, Objective(costs, state), costs, lanes, most_rows=most_rows)
    assert found is not None
    return found


@pytest.mark.parametrize("others", [0, 7])
@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_the_best_of_all_prefixes_lengths_and_shares(seed: int, others: int) -> None:
    """With lanes that cost the same in every step, and with others. Caught: rows without prompts, or only drafts;
    context of all sequences together.
    """
    random = np.random.default_rng(seed)
    alphas = random.uniform(0.2, 0.95, size=4)
    state = candidates(
        np.concatenate([constant(alpha, 1, 5) for alpha in alphas]),
        limit=random.integers(0, 6, size=4),
        other_rows=others,
        kv_tokens=100,
    )
    drafting = np.flatnonzero(state.limit)
    for lanes in (LANES, grids(seed)):
        found = best(state, lanes, COSTS)
        every = [
            brute_rate(state, chosen, length, each)
            for count in range(1, len(drafting) + 1)
            for chosen in itertools.combinations(drafting.tolist(), count)
            for length in range(1, 6)
            for each in lanes
        ]
        by_hand = brute_rate(state, tuple(found.chosen.tolist()), found.length, found.lanes)
        assert found.rate == pytest.approx(by_hand)
        assert found.rate >= 0.97 * max(every)  # sets that are no prefix of the order may be a little better


def test_drafts_are_not_overlapped_without_lanes_or_without_room() -> None:
    state = candidates(constant(0.9, 1, 4), kv_tokens=100)
    objective = Objective(COSTS, state)
    assert best_overlap(state, objective, COSTS, ()) is None
    assert best_overlap(candidates(constant(0.9, 1, 4), limit=ints(0)), objective, COSTS, LANES) is None


def test_no_choice_has_more_rows_than_lanes_have_graphs_for() -> None:
    """One sequence of three drafts at most then; with a row of its own less than what it wants, none. Prompts
    are other steps' rows.
    """
    state = candidates(constant(0.99, 4, 8), other_rows=100, kv_tokens=100)
    objective = Objective(COSTS, state)
    free = best(state, LANES)
    assert len(free.chosen) * (free.length - 1) > 12
    bounded = best(state, LANES, most_rows=12)
    assert 4 < len(bounded.chosen) * (bounded.length - 1) <= 8
    assert best_overlap(state, objective, COSTS, LANES, most_rows=3) is None


def test_a_draft_that_is_free_beats_one_that_is_waited_for() -> None:
    state = candidates(constant(0.9, 1, 6), kv_tokens=100)
    free = InterferenceTable.constant(share=0.5, verify=1.0, draft=1.0, verify_alone=1.0, draft_alone=1.0)
    slow = InterferenceTable.constant(share=0.5, verify=2.0, draft=2.0, verify_alone=2.0, draft_alone=2.0)
    assert best(state, (slow, free)).lanes is free
    assert best(state, (slow,)).rate < best(state, (free,)).rate


def test_the_host_time_of_drafts_counts() -> None:
    """Oracle: the same choice, in longer time. A gap of a millisecond is too short to change it."""
    state = candidates(constant(0.8, 1, 4), kv_tokens=100)
    costs = CostModel(StepTimes(tables=COSTS.tables))
    free = best(state, LANES, costs)
    for _ in range(200):
        costs.posterior.observe_gap(1, 0.001, drafts=True)
        costs.posterior.observe_gap(1, 0.0, drafts=False)
    charged = best(state, LANES, costs)
    assert charged.length == free.length
    worth = expected_worth(state, free.length)
    assert worth / charged.rate - worth / free.rate == pytest.approx(0.001, rel=0.01)


def expected_worth(state: Candidates, length: int) -> float:
    """Tokens of a step of one sequence that drafts this many tokens during every step."""
    ready, tokens = expected(state.survival)
    return 1 + ready.item(0, length - 1) * (tokens.item(0, length - 1) - 1)


SLOT, NUM_SLOTS = 3, 5


def draft(*token_ids: int, slot: int = SLOT) -> DraftTable:
    return table_of([slot], "draft_model", [token_ids], [[0.5] * len(token_ids)], width=4)


def learned(
    frontiers: Frontiers, unverified: tuple[int, ...], overlapped: DraftTable, token_ids: tuple[int, ...]
) -> tuple[bool, bool]:
    """Whether the draft stands, and whether it is wrong, after a step that sampled token_ids in each slot."""
    slots = overlapped.slots.tolist()
    stand, wrong = frontiers.learn(overlapped, dict.fromkeys(slots, unverified), dict.fromkeys(slots, token_ids))
    return bool(stand.all()), bool(wrong.all())


def ready(frontiers: Frontiers, *slots: int) -> list[tuple[int, tuple[int, ...]]]:
    """Positions of the slots whose draft stands, and its tokens."""
    positions, drafts = frontiers.standing(ints(*slots))
    return [(at, drafts.tokens(i)) for i, at in enumerate(positions.tolist())]


@pytest.mark.parametrize("unverified", [(), (1,), (1, 2)])
@pytest.mark.parametrize("drafted", [(), (1,), (2, 1), (1, 1, 2)])
def test_a_draft_stands_exactly_if_the_targets_tokens_are_those_assumed(
    unverified: tuple[int, ...], drafted: tuple[int, ...]
) -> None:
    """Oracle: every run of tokens that a step over `unverified` can sample. A draft of one token has no chunk."""
    for right in range(len(unverified) + 1):
        for own in (1, 2):
            if right < len(unverified) and own == unverified[right]:
                continue  # then it would have been accepted
            frontiers, sampled = Frontiers(NUM_SLOTS), (*unverified[:right], own)
            stands, is_wrong = learned(frontiers, unverified, draft(*drafted), sampled)
            assert stands == (bool(drafted) and sampled == (*unverified, *drafted[:1]))
            assert is_wrong == (bool(drafted) and right == len(unverified) and not stands)
            assert ready(frontiers, SLOT) == ([(0, drafted)] if stands and len(drafted) > 1 else [])


@pytest.mark.parametrize("token_ids", [(7, 8), (7,), ()])
def test_a_step_that_sampled_fewer_tokens_than_were_assumed_decides_nothing(token_ids: tuple[int, ...]) -> None:
    assert learned(Frontiers(NUM_SLOTS), (7, 8), draft(9), token_ids) == (False, False)


def test_chunks_are_found_in_the_order_of_the_slots_that_are_asked_for() -> None:
    """Of four slots one was not drafted for, and one draft is wrong."""
    frontiers = Frontiers(NUM_SLOTS)
    drafts = joined([draft(1, 2, slot=0), draft(2, 2, slot=1), draft(1, 3, 4, slot=4)])
    stand, wrong = frontiers.learn(drafts, {}, {0: (1,), 1: (1,), 4: (1,)})
    assert (stand.tolist(), wrong.tolist()) == ([True, False, True], [False, True, False])
    assert ready(frontiers, 4, 1, 2, 0) == [(0, (1, 3, 4)), (3, (1, 2))]


def test_no_draft_stands_in_a_slot_that_was_released() -> None:
    frontiers = Frontiers(NUM_SLOTS)
    learned(frontiers, (), joined([draft(1, 2), draft(1, 5, slot=SLOT + 1)]), (1,))
    frontiers.release(SLOT)
    assert ready(frontiers, SLOT, SLOT + 1) == [(1, (1, 5))]


def test_what_was_taken_stands_no_more() -> None:
    frontiers = Frontiers(NUM_SLOTS)
    learned(frontiers, (), draft(1, 2), (1,))
    frontiers.clear()
    assert ready(frontiers, SLOT) == []


def test_only_chosen_slots_draft_and_a_sequence_that_starts_drafts() -> None:
    frontiers, slots = Frontiers(4), ints(3, 0, 2)
    frontiers.choose(slots, ints(1))
    assert frontiers.drafts(np.arange(4)).tolist() == [True, True, False, False]
    frontiers.start(2)
    assert frontiers.drafts(slots).tolist() == [False, True, True]
