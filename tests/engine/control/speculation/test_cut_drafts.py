"""What the control plane learns from cut drafts. Oracle: a loop over the drafted tokens of each sequence.

Planted bugs that these tests have caught: a right token that was cut taken for a refusal; the first cut token
taken for judged although an earlier token was refused.
"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from faser.engine.contract.plan import SequenceResult, SequenceRows, StepPlan, StepResult
from faser.engine.control.speculation.acceptance.estimator import Outcomes
from faser.engine.control.speculation.cut_drafts import cut_drafts

CAP = 5
drafts_strategy = st.lists(st.lists(st.integers(0, 1), max_size=CAP), min_size=1, max_size=5)


def step_of(drafts: list[list[int]], left: list[int], came: list[tuple[int, ...]]) -> tuple[StepPlan, StepResult]:
    """left: tokens of each draft that were cut. came: tokens that each sequence got."""
    rows = tuple(
        SequenceRows(slot=slot, start=3, token_ids=(9, *draft), new_blocks=(), samples=True, num_drafts=len(draft))
        for slot, draft in enumerate(drafts)
    )
    results = tuple(
        SequenceResult(slot=slot, token_ids=tokens, num_cut=gone)
        for slot, (tokens, gone) in enumerate(zip(came, left, strict=True))
    )
    plan = StepPlan(step=1, released=(), started=(), rows=rows)
    return plan, StepResult(step=1, sequences=results, run_s=1.0)


def tokens_and_acceptance(draft: list[int], target: list[int], stayed: int) -> tuple[tuple[int, ...], list[bool]]:
    """What a sequence gets when its draft is cut to `stayed` tokens, and which judged tokens were right."""
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
def test_acceptance_is_learned_of_the_tokens_that_were_judged_and_of_no_others(
    drafts: list[list[int]], data: st.DataObject
) -> None:
    targets = [data.draw(st.lists(st.integers(0, 1), min_size=CAP + 1, max_size=CAP + 1)) for _ in drafts]
    left = [data.draw(st.integers(0, len(draft))) for draft in drafts]
    expected = [
        tokens_and_acceptance(draft, target, len(draft) - gone)
        for draft, target, gone in zip(drafts, targets, left, strict=True)
    ]
    plan, result = step_of(drafts, left, [came for came, _ in expected])
    order = np.array(data.draw(st.permutations(range(len(drafts)))), dtype=np.int64)
    found = cut_drafts(order, plan, result)
    if found is None:
        assert not any(left)
        return
    assert found.num_cut.tolist() == [left[slot] for slot in order]
    stayed = np.array([len(drafts[slot]) - left[slot] for slot in order])
    outcomes = Outcomes(
        slots=order,
        methods=np.zeros_like(order),
        drafted=np.array([len(drafts[slot]) for slot in order]),
        verified=stayed,
        accepted=np.array([len(expected[slot][0]) - 1 for slot in order]),
        confidences=np.zeros((len(order), CAP)),
    )
    judged = found.with_first_cut(outcomes)
    for at, slot in enumerate(order.tolist()):
        number = min(int(judged.accepted[at]) + 1, int(judged.verified[at]))  # as acceptance counts
        assert [depth < judged.accepted[at] for depth in range(number)] == expected[slot][1]
        assert judged.verified[at] <= judged.drafted[at]


def test_a_step_that_cut_no_draft_teaches_nothing_more() -> None:
    plan, result = step_of([[1, 1], []], [0, 0], [(1, 0), (1,)])
    assert cut_drafts(np.array([0, 1]), plan, result) is None


def test_a_sequence_that_failed_was_not_right() -> None:
    plan, result = step_of([[1, 1]], [2], [()])
    found = cut_drafts(np.array([0]), plan, result)
    assert found is not None
    assert (found.num_cut.tolist(), found.first_is_right.tolist()) == ([2], [0])
