"""An overlapped draft stands exactly if the target sampled what the draft assumed, the border included."""

import numpy as np
import pytest

from faser.engine.contract.plan import Draft
from faser.engine.control.speculation.overlap import Border, Frontiers

SLOT = 3


def draft(*token_ids: int) -> Draft:
    return Draft(slot=SLOT, method="draft_model", token_ids=token_ids, confidences=(0.5,) * len(token_ids))


def judged(
    unverified: tuple[int, ...], overlapped: Draft, token_ids: tuple[int, ...]
) -> tuple[Border, Draft | None]:
    frontiers = Frontiers(SLOT + 2)
    border = frontiers.judge(unverified, overlapped, token_ids)
    return border, frontiers.standing([SLOT])[0]


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
            border, standing = judged(unverified, draft(*drafted), (*unverified[:right], own))
            assumed = (*unverified, *drafted[:1])
            if drafted and (*unverified[:right], own) == assumed:
                assert border is Border.PASSED
                assert standing is not None
                assert standing.token_ids == drafted
            else:
                assert standing is None
                reached = right == len(unverified) and bool(drafted)
                assert border is (Border.REFUSED if reached else Border.UNJUDGED)


def test_a_step_that_brought_fewer_tokens_than_were_assumed_judges_nothing() -> None:
    assert judged((7, 8), draft(9), (7, 8))[0] is Border.UNJUDGED
    assert judged((7, 8), draft(9), (7,))[0] is Border.UNJUDGED
    assert judged((7, 8), draft(9), ())[0] is Border.UNJUDGED


def test_no_draft_stands_in_a_slot_that_was_released() -> None:
    frontiers, kept = Frontiers(SLOT + 2), Draft(slot=SLOT + 1, method="suffix", token_ids=(1, 2))
    frontiers.judge((), draft(1, 2), (1,))
    frontiers.judge((), kept, (1,))
    frontiers.release(SLOT)
    assert frontiers.standing([SLOT, SLOT + 1]) == [None, kept]


def test_what_was_taken_stands_no_more() -> None:
    frontiers = Frontiers(SLOT + 2)
    frontiers.judge((), draft(1, 2), (1,))
    frontiers.clear()
    assert frontiers.standing([SLOT]) == [None]


def test_only_chosen_slots_draft_and_a_sequence_that_starts_drafts() -> None:
    frontiers, slots = Frontiers(4), np.array([3, 0, 2])
    frontiers.choose(slots, np.array([1]))
    assert frontiers.drafts(np.arange(4)).tolist() == [True, True, False, False]
    frontiers.start(2)
    assert frontiers.drafts(slots).tolist() == [False, True, True]
