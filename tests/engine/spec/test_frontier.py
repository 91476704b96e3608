"""A draft made ahead stands exactly if the target went the way it assumed, over the border included."""

import pytest

from faser.engine.plan import Draft
from faser.engine.spec.frontier import Ahead, Border, Frontiers

SLOT = 3


def draft(*token_ids: int) -> Draft:
    return Draft(slot=SLOT, method="draft_model", token_ids=token_ids, confidences=(0.5,) * len(token_ids))


def judged(behind: tuple[int, ...], ahead: Draft, token_ids: tuple[int, ...]) -> tuple[Border, Draft | None]:
    frontiers = Frontiers()
    frontiers.note(SLOT, Ahead(behind=behind, draft=ahead))
    border, found = frontiers.judge(SLOT, token_ids)
    assert found is ahead
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


def test_what_is_left_is_forgotten() -> None:
    frontiers = Frontiers()
    frontiers.note(SLOT, Ahead(behind=(), draft=draft(1, 2)))
    frontiers.judge(SLOT, (1,))
    frontiers.drop(SLOT)
    assert frontiers.standing([SLOT]) == [None]
    frontiers.note(SLOT, Ahead(behind=(), draft=draft(1, 2)))
    frontiers.drop(SLOT)
    assert frontiers.judge(SLOT, (1,)) == (Border.UNJUDGED, None)


def test_chunks_are_cleared_and_drafts_under_way_stay() -> None:
    frontiers = Frontiers()
    frontiers.note(SLOT, Ahead(behind=(), draft=draft(1, 2)))
    frontiers.judge(SLOT, (1,))
    frontiers.note(SLOT, Ahead(behind=(2,), draft=draft(5)))
    frontiers.clear()
    assert frontiers.standing([SLOT]) == [None]
    assert frontiers.judge(SLOT, (2, 5))[0] is Border.PASSED
