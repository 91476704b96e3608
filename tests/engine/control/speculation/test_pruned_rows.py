"""What the control plane makes of rows that left. Oracle: a loop over the drafted tokens of each sequence.

Planted bugs that these tests have caught: a false prune taken for a refusal; the flagged token of a draft that was
refused before it taken for judged; the saving of all layers instead of those after the look.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.engine.contract.plan import SequenceResult, SequenceRows, StepPlan, StepResult
from faser.engine.control.speculation.acceptance.estimator import Outcomes
from faser.engine.control.speculation.pruned_rows import pruned_rows, saved_s
from faser.engine.control.timing.cost_model import CostModel

CAP = 5
drafts_strategy = st.lists(st.lists(st.integers(0, 1), max_size=CAP), min_size=1, max_size=5)


def step_of(
    drafts: list[list[int]], left: list[int], came: list[tuple[int, ...]], *, after: float = 0.5
) -> tuple[StepPlan, StepResult]:
    """left: rows of each draft that left."""
    rows = tuple(
        SequenceRows(slot=slot, start=3, token_ids=(9, *draft), new_blocks=(), samples=True, num_drafts=len(draft))
        for slot, draft in enumerate(drafts)
    )
    results = tuple(
        SequenceResult(slot=slot, token_ids=tokens, num_pruned=gone)
        for slot, (tokens, gone) in enumerate(zip(came, left, strict=True))
    )
    plan = StepPlan(step=1, released=(), started=(), rows=rows)
    return plan, StepResult(step=1, sequences=results, run_s=1.0, pruned_after=after)


def judged(draft: list[int], target: list[int], stayed: int) -> tuple[tuple[int, ...], list[bool]]:
    """Tokens of a sequence of which `stayed` draft rows stay, and which of its draft tokens were right."""
    came: list[int] = []
    found: list[bool] = []
    for depth in range(stayed + 1):
        came.append(target[depth])
        if depth < len(draft):
            found.append(draft[depth] == target[depth])
        if depth < len(draft) and not found[-1]:
            break
    return tuple(came), found


@given(drafts_strategy, st.data())
def test_exactly_the_tokens_that_were_judged_are_learned(drafts: list[list[int]], data: st.DataObject) -> None:
    targets = [data.draw(st.lists(st.integers(0, 1), min_size=CAP + 1, max_size=CAP + 1)) for _ in drafts]
    left = [data.draw(st.integers(0, len(draft))) for draft in drafts]
    expected = [
        judged(draft, target, len(draft) - gone) for draft, target, gone in zip(drafts, targets, left, strict=True)
    ]
    plan, result = step_of(drafts, left, [came for came, _ in expected])
    order = np.array(data.draw(st.permutations(range(len(drafts)))), dtype=np.int64)
    found = pruned_rows(order, plan, result)
    if found is None:
        assert not any(left)
        return
    assert found.counts.tolist() == [left[slot] for slot in order]
    stayed = np.array([len(drafts[slot]) - left[slot] for slot in order])
    outcomes = Outcomes(
        slots=order,
        methods=np.zeros_like(order),
        drafted=np.array([len(drafts[slot]) for slot in order]),
        verified=stayed,
        accepted=np.array([len(expected[slot][0]) - 1 for slot in order]),
        confidences=np.zeros((len(order), CAP)),
    )
    learned = found.judged(outcomes)
    for at, slot in enumerate(order.tolist()):
        said = expected[slot][1]
        number = min(int(learned.accepted[at]) + 1, int(learned.verified[at]))  # as acceptance counts
        assert [depth < learned.accepted[at] for depth in range(number)] == said
        assert learned.verified[at] <= learned.drafted[at]


def test_nothing_is_made_of_a_step_that_all_rows_went_through() -> None:
    plan, result = step_of([[1, 1], []], [0, 0], [(1, 0), (1,)], after=1.0)
    assert pruned_rows(np.array([0, 1]), plan, result) is None


def test_a_sequence_that_failed_was_not_right() -> None:
    plan, result = step_of([[1, 1]], [2], [()])
    found = pruned_rows(np.array([0]), plan, result)
    assert found is not None
    assert (found.counts.tolist(), found.right.tolist()) == ([2], [0])


def test_rows_that_left_saved_the_remaining_layers() -> None:
    """Of 8 rows 3 leave after a quarter of the layers."""
    plan, result = step_of([[1, 1, 1], [0, 0, 0]], [1, 2], [(0,), (1,)], after=0.25)
    assert saved_s(CostModel.proportional(step_s=1.0, row_s=0.1), plan, result) == pytest.approx(0.225)
