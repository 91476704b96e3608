"""Drafts as arrays. Oracle: draft by draft."""

import numpy as np
import pytest

from faser.config.drafters import DRAFT_METHODS
from faser.engine.contract.plan import Draft
from faser.engine.control.speculation.acceptance.draft_arrays import DraftArrays, DraftReader

CAP = 4


def draft(slot: int, method: str, *confidences: float) -> Draft:
    return Draft(slot=slot, method=method, token_ids=(9,) * len(confidences), confidences=confidences)


def drafted_of(border: int = 0) -> DraftArrays:
    return DraftArrays(
        slots=np.array([4, 2]),
        methods=np.array([0, 2]),
        lengths=np.array([3, 2]),
        kept=np.array([2, 2]),
        confidences=np.arange(2.0 * CAP).reshape(2, CAP),
        survival=np.ones((2, CAP + 1)),
        border=border,
    )


@pytest.mark.parametrize(
    "drafts",
    [
        (draft(0, "suffix", 0.1, 0.2), draft(1, "suffix"), draft(2, "suffix", 0.3, 0.4, 0.5, 0.6)),
        (draft(0, "ngram", 2.0), draft(1, "suffix", 0.5, 0.4), draft(2, "draft_model", -1.0)),
        (draft(0, "suffix"), draft(1, "suffix")),
        (draft(0, "draft_model", 1.0),),
        (),
    ],
)
def test_every_draft_has_its_line(drafts: tuple[Draft, ...]) -> None:
    methods, lengths, confidences = DraftReader(CAP).read(drafts)
    assert [DRAFT_METHODS[i] for i in methods] == [each.method for each in drafts]
    assert lengths.tolist() == [len(each.token_ids) for each in drafts]
    padded = [[*each.confidences, *[0.0] * (CAP - len(each.confidences))] for each in drafts]
    assert confidences.tolist() == padded


def test_outcomes_count_the_border_if_requested() -> None:
    accepted = np.array([2, 0])
    chunk, whole = drafted_of(1).outcomes(accepted), drafted_of(1).outcomes(accepted, border=1)
    assert (chunk.drafted.tolist(), chunk.verified.tolist(), chunk.accepted.tolist()) == ([3, 2], [2, 2], [2, 0])
    assert (whole.drafted.tolist(), whole.verified.tolist(), whole.accepted.tolist()) == ([4, 3], [3, 3], [3, 1])


def test_a_selection_keeps_all_arrays() -> None:
    one = drafted_of(1).among(np.array([1]))
    assert (one.slots.tolist(), one.methods.tolist(), one.lengths.tolist(), one.kept.tolist()) == (
        [2],
        [2],
        [2],
        [2],
    )
    assert one.confidences.tolist() == [[4.0, 5.0, 6.0, 7.0]]
    assert one.border == 1
