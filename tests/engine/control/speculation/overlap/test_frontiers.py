"""A draft made ahead stands exactly if the target went the way it assumed, over the border included."""

import pytest

from faser.engine.contract.plan import Draft
from faser.engine.control.speculation.overlap.frontiers import Border, Frontiers

SLOT = 3


def draft(*token_ids: int) -> Draft:
    return Draft(slot=SLOT, method="draft_model", token_ids=token_ids, confidences=(0.5,) * len(token_ids))


def judged(behind: tuple[int, ...], ahead: Draft, token_ids: tuple[int, ...]) -> tuple[Border, Draft | None]:
    frontiers = Frontiers(SLOT + 2)
    border = frontiers.judge(behind, ahead, token_ids)
    return border, frontiers.standing([SLOT])[0]


@pytest.mark.parametrize("behind", [(), (1,), (1, 2)])
@pytest.mark.parametrize("drafted", [(), (1,), (2, 1), (1, 1, 2)])
def test_it_stands_exactly_if_the_targets_tokens_are_those_assumed(
    behind: tuple[int, ...], drafted: tuple[int, ...]
) -> None:
    """Oracle: every run of tokens that a step over `behind` can bring."""
    for right in range(len(behind) + 1):
        for own in (1, 2):
            if right < len(behind) and own == behind[right]:
                continue  # then it would have been accepted
            border, standing = judged(behind, draft(*drafted), (*behind[:right], own))
            assumed = (*behind, *drafted[:1])
            if drafted and (*behind[:right], own) == assumed:
                assert border is Border.PASSED
                assert standing is not None
                assert standing.token_ids == drafted
            else:
                assert standing is None
                reached = right == len(behind) and bool(drafted)
                assert border is (Border.REFUSED if reached else Border.UNJUDGED)


def test_a_step_that_brought_fewer_tokens_than_were_assumed_judges_nothing() -> None:
    assert judged((7, 8), draft(9), (7, 8))[0] is Border.UNJUDGED
    assert judged((7, 8), draft(9), (7,))[0] is Border.UNJUDGED
    assert judged((7, 8), draft(9), ())[0] is Border.UNJUDGED


def test_a_slot_that_is_left_has_nothing_standing() -> None:
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
