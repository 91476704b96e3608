"""Drafts as arrays, and verdicts on them. Oracle: draft by draft, a loop over the tokens of each sequence.

Planted bugs that these tests have caught: the first token that is cut is not judged; a token at which nothing came
is judged; the first token of a chunk is not among the accepted; a drawn draft is judged beyond what was verified;
a dropped token counts where the drafts were ended together.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.config.speculation import DRAFT_METHODS
from faser.engine.contract.plan import Draft
from faser.engine.control.speculation.acceptance import (
    DraftArrays,
    DraftReader,
    ReadDrafts,
    came_tokens,
    with_dropped,
)

CAP = 4


def draft(slot: int, method: str, *confidences: float) -> Draft:
    token_ids = tuple(10 * slot + i for i in range(len(confidences)))
    return Draft(slot=slot, method=method, token_ids=token_ids, confidences=confidences)


def read(*token_ids: tuple[int, ...]) -> ReadDrafts:
    """Drafts of these tokens in slots 0, 1, …"""
    drafts = [
        Draft(slot=slot, method="draft_model", token_ids=each, confidences=(1.0,) * len(each))
        for slot, each in enumerate(token_ids)
    ]
    return DraftReader(CAP).read(drafts)


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
    found = DraftReader(CAP).read(drafts)
    assert found.slots.tolist() == [each.slot for each in drafts]
    assert [DRAFT_METHODS[i] for i in found.methods] == [each.method for each in drafts]
    assert found.lengths.tolist() == [len(each.token_ids) for each in drafts]
    padding = [CAP - len(each.token_ids) for each in drafts]
    confidences = [[*each.confidences, *[0.0] * n] for each, n in zip(drafts, padding, strict=True)]
    token_ids = [[*each.token_ids, *[-1] * n] for each, n in zip(drafts, padding, strict=True)]
    assert found.confidences.tolist() == confidences
    assert found.token_ids.tolist() == token_ids


@dataclass
class Verified:
    """One draft, how many of its tokens the step verified, and the tokens that came.

    The target's own next tokens are `target`; a step brings the verified tokens that agree with it, and one more.
    border: the first token was accepted by the step before.
    """

    token_ids: tuple[int, ...]
    kept: int
    target: tuple[int, ...]
    border: int = 0

    @property
    def came(self) -> tuple[int, ...]:
        rows = self.token_ids[self.border : self.border + self.kept]
        accepted = 0
        while accepted < len(rows) and rows[accepted] == self.target[accepted]:
            accepted += 1
        return self.target[: accepted + 1]

    def verdict(self) -> tuple[int, int]:
        """(judged, accepted) tokens of the whole draft, one after the other."""
        judged = accepted = self.border
        for token_id, came in zip(self.token_ids[self.border :], self.came, strict=False):
            judged += 1
            if token_id != came:
                break
            accepted += 1
        return judged, accepted


@st.composite
def verified(pick: st.DrawFn, border: int) -> Verified:
    """Of a vocabulary of two, so that drafts are often right."""
    tokens = st.integers(0, 1)
    token_ids = tuple(pick(st.lists(tokens, min_size=2 * border, max_size=CAP)))
    return Verified(
        token_ids=token_ids,
        kept=pick(st.integers(0, len(token_ids) - border)),
        target=tuple(pick(st.lists(tokens, min_size=CAP + 1, max_size=CAP + 1))),
        border=border,
    )


@given(data=st.data(), border=st.integers(0, 1), count=st.integers(1, 5))
def test_a_token_is_judged_exactly_where_one_came_after_tokens_that_were_right(
    data: st.DataObject, border: int, count: int
) -> None:
    """Drafts that are cut or not verified at all, and chunks of overlapped drafts, included."""
    each = [data.draw(verified(border)) for _ in range(count)]
    drafted = DraftArrays(
        drafts=read(*(one.token_ids for one in each)),
        kept=np.array([one.kept for one in each]),
        survival=np.ones((count, CAP + 1)),
        border=border,
    )
    accepted = np.array([len(one.came) - 1 for one in each])
    found = drafted.verdicts(accepted, np.array([one.came[-1] for one in each]))
    assert [*zip(found.judged.tolist(), found.accepted.tolist(), strict=True)] == [one.verdict() for one in each]
    assert (found.slots.tolist(), found.confidences.shape) == ([*range(count)], (count, CAP))


@given(st.lists(st.tuples(st.integers(0, CAP), st.integers(0, CAP), st.integers(0, CAP)), min_size=1, max_size=5))
def test_of_drawn_drafts_only_what_was_verified_is_judged(drafts: list[tuple[int, int, int]]) -> None:
    """A drawn token may be refused though the same token then comes, so tokens are not compared."""
    each = [(length, min(kept, length), min(right, kept, length)) for length, kept, right in drafts]
    drafted = DraftArrays(
        drafts=read(*((7,) * length for length, _, _ in each)),
        kept=np.array([kept for _, kept, _ in each]),
        survival=np.ones((len(each), CAP + 1)),
        drawn=True,
    )
    found = drafted.verdicts(np.array([right for _, _, right in each]), np.full(len(each), 7))
    assert found.accepted.tolist() == [right for _, _, right in each]
    assert found.judged.tolist() == [right + (right < kept) for _, kept, right in each]


def test_a_draft_for_which_no_token_came_is_not_judged() -> None:
    drafts = read((1, 2), (), (3,))
    found = drafts.verdicts(came_tokens([(), (5,), (3, 4)], CAP))
    assert found.judged.tolist() == [0, 0, 1]
    assert found.accepted.tolist() == [0, 0, 1]


def test_tokens_that_came_are_padded_and_cut_to_the_width() -> None:
    found = came_tokens([(1,), (), (2, 3, 4), (5, 6)], 2).tolist()
    assert found == [[1, -2], [-2, -2], [2, 3], [5, 6]]
    assert came_tokens([(), ()], 2).tolist() == [[-2, -2], [-2, -2]]


def test_a_selection_keeps_all_arrays_and_what_they_mean() -> None:
    drafts = DraftReader(CAP).read([draft(4, "suffix", 0.1, 0.2), draft(2, "ngram", 3.0)])
    one = DraftArrays(
        drafts=drafts,
        kept=np.array([2, 1]),
        survival=np.arange(2.0 * CAP + 2).reshape(2, -1),
        border=1,
        drawn=True,
    ).among(np.array([1]))
    assert (one.drafts.slots.tolist(), one.drafts.lengths.tolist(), one.kept.tolist()) == ([2], [1], [1])
    assert one.drafts.token_ids.tolist() == [[20, -1, -1, -1]]
    assert one.drafts.confidences.tolist() == [[3.0, 0.0, 0.0, 0.0]]
    assert DRAFT_METHODS[one.drafts.methods[0]] == "ngram"
    assert one.survival.tolist() == [[5.0, 6.0, 7.0, 8.0, 9.0]]
    assert (one.border, one.drawn) == (1, True)


@given(
    price=st.floats(0.01, 0.9),
    pass_price=st.floats(0.0, 2.0),
    chances=st.lists(st.lists(st.floats(0.05, 0.99), min_size=CAP, max_size=CAP), min_size=1, max_size=4),
    data=st.data(),
)
def test_a_dropped_token_is_known_to_be_worth_no_more_than_its_row(
    price: float, pass_price: float, chances: list[list[float]], data: st.DataObject
) -> None:
    """Oracle: the passes of a drafter, in which it is seen which draft loses a token to the price of a row."""
    requested = [data.draw(st.integers(1, CAP)) for _ in chances]
    survival = np.zeros((len(chances), CAP + 1))
    survival[:, 0] = 1.0
    lengths, dropped, going, passes = [0] * len(chances), set(), [*range(len(chances))], 0
    while going:
        passes += 1
        staying = []
        for i in going:
            reached = survival.item(i, lengths[i]) * chances[i][lengths[i]]
            if reached <= price:
                dropped.add(i)
                continue
            lengths[i] += 1
            survival[i, lengths[i]] = reached
            if lengths[i] < requested[i]:
                staying.append(i)
        going = staying
        if sum(survival.item(i, lengths[i]) - price for i in going) <= pass_price:
            break
    before = survival.copy()
    tried, known = with_dropped(np.array(lengths), np.array(requested), survival, passes=passes, row_price=price)
    assert (survival == before).all()
    assert tried.tolist() == [length + (i in dropped) for i, length in enumerate(lengths)]
    for i, length in enumerate(lengths):
        assert known[i, : length + 1].tolist() == before[i, : length + 1].tolist()
        if i in dropped:
            assert known[i, length + 1] == pytest.approx(min(price, before[i, length]))
