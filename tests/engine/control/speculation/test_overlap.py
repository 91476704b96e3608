"""What overlapped drafting brings. Oracles: the state machine played out, every choice tried one by one.

An overlapped draft stands exactly if the target sampled what the draft assumed, the bonus token included.
"""

import itertools

import numpy as np
import pytest

from faser.engine.contract.plan import Draft
from faser.engine.contract.step_times import InterferenceTable, Matrix, StepTimes
from faser.engine.control.speculation.draft_lengths import Objective
from faser.engine.control.speculation.overlap import FirstToken, Frontiers, OverlapChoice, best_overlap, expected
from faser.engine.control.speculation.policy import Candidates
from faser.engine.control.step_cost import CostModel, GapKind

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


def candidates(survival: np.ndarray, **other: object) -> Candidates:
    count, columns = survival.shape
    fields: dict[str, object] = {
        "slots": np.arange(count),
        "limit": np.full(count, columns - 1),
        "survival": survival,
        "weight": np.ones(count),
        "missing_kv": np.ones(count, dtype=np.int64),
        "other_rows": 0,
        "kv_tokens": 100,
    }
    return Candidates(**(fields | other))  # type: ignore[arg-type]


def geometric(alpha: float, cap: int) -> np.ndarray:
    return np.array([[alpha**k for k in range(cap + 1)]])


@pytest.mark.parametrize(("alpha", "length"), [(0.9, 4), (0.8, 2), (0.6, 5), (0.3, 3)])
def test_a_constant_acceptance_gives_the_closed_form_of_pearl(alpha: float, length: int) -> None:
    ready, tokens = expected(geometric(alpha, length))
    pi = alpha / (1 + alpha - alpha**length)
    assert ready[0, length - 1] == pytest.approx(pi)
    mean = (1 - pi) + pi * (1 - alpha**length) / (1 - alpha)
    assert 1 + ready[0, length - 1] * (tokens[0, length - 1] - 1) == pytest.approx(mean)


@pytest.mark.parametrize(("alpha", "length"), [(0.9, 4), (0.8, 2), (0.6, 5), (0.5, 1)])
def test_the_expectation_is_that_of_the_state_machine_played_out(alpha: float, length: int) -> None:
    share, rate = played([alpha] * length, length, 60_000, seed=length)
    ready, tokens = expected(geometric(alpha, length))
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
        worth += state.weight[s] * ready * (sum(survival[1:]) / survival[1] - 1)
        rows += ready * (most - 1)
    draft_s = length * COSTS.pass_s(len(chosen))
    verify_s = objective.verify_s(np.array([round(rows)]))[0]
    step_rows = len(state.slots) + state.other_rows + round(rows)
    context = state.kv_tokens / len(state.slots)
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
        np.concatenate([geometric(alpha, 5) for alpha in alphas]),
        weight=random.uniform(0.5, 2.0, size=4),
        limit=random.integers(0, 6, size=4),
        other_rows=others,
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
    state = candidates(geometric(0.9, 4))
    objective = Objective(COSTS, state)
    assert best_overlap(state, objective, COSTS, ()) is None
    assert best_overlap(candidates(geometric(0.9, 4), limit=np.array([0])), objective, COSTS, LANES) is None


def test_no_choice_has_more_rows_than_lanes_have_graphs_for() -> None:
    """One sequence of three drafts at most then; with a row of its own less than what it wants, none. Prompts
    are other steps' rows.
    """
    state = candidates(np.concatenate([geometric(0.99, 8)] * 4), other_rows=100)
    objective = Objective(COSTS, state)
    free = best(state, LANES)
    assert len(free.chosen) * (free.length - 1) > 12
    bounded = best(state, LANES, most_rows=12)
    assert 4 < len(bounded.chosen) * (bounded.length - 1) <= 8
    assert best_overlap(state, objective, COSTS, LANES, most_rows=3) is None


def test_a_draft_that_is_free_beats_one_that_is_waited_for() -> None:
    state = candidates(geometric(0.9, 6))
    free = InterferenceTable.constant(share=0.5, verify=1.0, draft=1.0, verify_alone=1.0, draft_alone=1.0)
    slow = InterferenceTable.constant(share=0.5, verify=2.0, draft=2.0, verify_alone=2.0, draft_alone=2.0)
    assert best(state, (slow, free)).lanes is free
    assert best(state, (slow,)).rate < best(state, (free,)).rate


def test_the_gap_of_an_overlapped_step_counts_where_steps_without_drafts_leave_none() -> None:
    """Oracle: the same choice, in longer time. A gap of a millisecond is too short to change it."""
    state = candidates(geometric(0.8, 4), launches_ahead=True)
    costs = CostModel(StepTimes(tables=COSTS.tables))
    free = best(state, LANES, costs)
    for _ in range(200):
        costs.host_gaps.observe(GapKind.OVERLAPPED, 0.001, 1)
        costs.host_gaps.observe(GapKind.AHEAD, 0.0, 1)
    charged = best(state, LANES, costs)
    assert charged.length == free.length
    worth = expected_worth(state, free.length)
    assert worth / charged.rate - worth / free.rate == pytest.approx(0.001, rel=0.01)


def expected_worth(state: Candidates, length: int) -> float:
    """Tokens of a step of one sequence that drafts this many tokens during every step."""
    ready, tokens = expected(state.survival)
    return 1 + ready.item(0, length - 1) * (tokens.item(0, length - 1) - 1)


SLOT = 3


def draft(*token_ids: int) -> Draft:
    return Draft(slot=SLOT, method="draft_model", token_ids=token_ids, confidences=(0.5,) * len(token_ids))


def judged(
    unverified: tuple[int, ...], overlapped: Draft, token_ids: tuple[int, ...]
) -> tuple[FirstToken, Draft | None]:
    frontiers = Frontiers(SLOT + 2)
    first = frontiers.check(unverified, overlapped, token_ids)
    return first, frontiers.standing([SLOT])[0]


@pytest.mark.parametrize("unverified", [(), (1,), (1, 2)])
@pytest.mark.parametrize("drafted", [(), (1,), (2, 1), (1, 1, 2)])
def test_it_stands_exactly_if_the_targets_tokens_are_those_assumed(
    unverified: tuple[int, ...], drafted: tuple[int, ...]
) -> None:
    """Oracle: every run of tokens that a step over `unverified` can bring."""
    for right in range(len(unverified) + 1):
        for own in (1, 2):
            if right < len(unverified) and own == unverified[right]:
                continue  # then it would have been accepted
            first, standing = judged(unverified, draft(*drafted), (*unverified[:right], own))
            assumed = (*unverified, *drafted[:1])
            if drafted and (*unverified[:right], own) == assumed:
                assert first is FirstToken.RIGHT
                assert standing is not None
                assert standing.token_ids == drafted
            else:
                assert standing is None
                reached = right == len(unverified) and bool(drafted)
                assert first is (FirstToken.WRONG if reached else FirstToken.UNKNOWN)


def test_a_step_that_brought_fewer_tokens_than_were_assumed_judges_nothing() -> None:
    assert judged((7, 8), draft(9), (7, 8))[0] is FirstToken.UNKNOWN
    assert judged((7, 8), draft(9), (7,))[0] is FirstToken.UNKNOWN
    assert judged((7, 8), draft(9), ())[0] is FirstToken.UNKNOWN


def test_no_draft_stands_in_a_slot_that_was_released() -> None:
    frontiers, kept = Frontiers(SLOT + 2), Draft(slot=SLOT + 1, method="suffix", token_ids=(1, 2))
    frontiers.check((), draft(1, 2), (1,))
    frontiers.check((), kept, (1,))
    frontiers.release(SLOT)
    assert frontiers.standing([SLOT, SLOT + 1]) == [None, kept]


def test_what_was_taken_stands_no_more() -> None:
    frontiers = Frontiers(SLOT + 2)
    frontiers.check((), draft(1, 2), (1,))
    frontiers.clear()
    assert frontiers.standing([SLOT]) == [None]


def test_only_chosen_slots_draft_and_a_sequence_that_starts_drafts() -> None:
    frontiers, slots = Frontiers(4), np.array([3, 0, 2])
    frontiers.choose(slots, np.array([1]))
    assert frontiers.drafts(np.arange(4)).tolist() == [True, True, False, False]
    frontiers.start(2)
    assert frontiers.drafts(slots).tolist() == [False, True, True]
