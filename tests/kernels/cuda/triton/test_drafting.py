"""Triton's `match` and `advance` against a search and a layout written out row by row.

Bugs these tests have been seen to catch: a token too few accepted; a last token that counts as a draft token; fed
tokens of the next draft; a length that stays where a draft was refused at its first token; a row that is stored
beyond its sequence's blocks; padding rows that are moved.
"""

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from faser.config.speculation import MAX_DRAFT_TOKENS
from faser.kernels.cuda.flashinfer.paged_layout import NO_SLOT, LayoutSizes, PagedLayout, layout_within
from faser.kernels.cuda.triton.drafting import advance, match
from faser.kernels.interface.drafting import FollowedRows, StepMatch
from tests.kernels.cuda.triton.rows import DEVICE

BLOCK_SIZE, WIDTH = 4, 8


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def step_of(sampled: list[list[int]], drafts: list[list[int]], known: list[int], *, fed: bool) -> StepMatch:
    """fed: the draft tokens are on the device alone, draft after draft."""
    tokens = [token_id for draft in drafts for token_id in draft]
    drafted: list[int] = []
    at = 0
    for draft in drafts:
        drafted += [-2 - at - i for i in range(len(draft))] if fed else draft
        drafted.append(-1)
        at += len(draft)
    bounds = [0]
    for rows in sampled:
        bounds.append(bounds[-1] + len(rows))
    return StepMatch(
        sampled=ints([token_id for rows in sampled for token_id in rows]),
        drafted=ints(drafted),
        decided=ints([-1] * len(drafted)),
        fed=ints(tokens or [0]),
        first=ints(bounds),
        known=ints(known),
        counts=torch.zeros(len(known), dtype=torch.int64, device=DEVICE),
        last=torch.zeros(len(known), 2, dtype=torch.int64, device=DEVICE),
    )


@pytest.mark.parametrize("fed", [False, True])
def test_a_draft_is_accepted_up_to_the_first_token_that_is_not_the_sampled_one(fed: bool) -> None:
    """Drafts of all lengths, refused at every token, and whole ones; -1 is no token at all."""
    rng = random.Random(fed)
    for _ in range(4):
        drafts = [[rng.randrange(5) for _ in range(rng.choice((0, 1, 2, 5, MAX_DRAFT_TOKENS)))] for _ in range(6)]
        sampled = [[*draft, rng.randrange(5)] for draft in drafts]
        for rows in sampled:
            if rng.random() < 0.7:
                rows[rng.randrange(len(rows))] = rng.choice((0, 1, 4, -1))
        known = [rng.randrange(5) for _ in drafts]
        step = step_of(sampled, drafts, known, fed=fed)
        match(step)
        for at, (rows, draft) in enumerate(zip(sampled, drafts, strict=True)):
            count = 0
            while count < len(draft) and rows[count] == draft[count]:
                count += 1
            text = [known[at], *rows[: count + 1]]
            assert int(step.counts[at]) == count + 1
            assert step.last[at].tolist() == [max(each, 0) for each in text[-2:]]


def test_a_drafted_token_that_is_none_counts_as_token_0() -> None:
    """As the rows that it was fed to have it."""
    step = step_of([[0, 3]], [[-1]], [2], fed=True)
    match(step)
    assert (step.counts.tolist(), step.last.tolist()) == ([2], [[0, 3]])


def test_verdicts_that_are_given_count_more_than_samples() -> None:
    """The first draft token is accepted and the second refused; the last row has none to accept."""
    step = step_of([[5, 8, 9], [5, 6]], [[7, 8], [6]], [2, 3], fed=True)
    step.decided.copy_(ints([1, 0, 1, 1, 1]))
    match(step)
    assert step.counts.tolist() == [2, 2]
    assert step.last.tolist() == [[7, 8], [6, 6]]


def layout_of(num_pages: list[int]) -> PagedLayout:
    """Rows with so many blocks each; every other number is one that no row has."""
    sizes = LayoutSizes(rows=len(num_pages), sequences=len(num_pages), pages=sum(num_pages))
    found = layout_within(torch.full((sizes.numbers,), -77, dtype=torch.int32, device=DEVICE), sizes)
    starts = torch.tensor([0, *num_pages]).cumsum(0)
    found.page_indptr.copy_(starts)
    found.page_indices.copy_(torch.arange(sum(num_pages)).flip(0) + 100)
    return found


def rows_at(
    lengths: list[int], bases: list[int], sources: list[int], shifts: tuple[int, ...] = (0, 0, 0)
) -> FollowedRows:
    count, rest = len(bases), [-1] * (WIDTH - len(bases))
    numbers = [count, *bases, *rest, *sources, *rest, *shifts, *rest]
    return FollowedRows(
        numbers=ints(numbers),
        lengths=ints(lengths + [-9] * (WIDTH - len(lengths))),
        fed=ints([-9] * 2 * WIDTH),
        positions=ints([-9] * WIDTH),
    )


def expect_places(layout: PagedLayout, lengths: list[int]) -> None:
    """The rows are where sequences of these lengths have their last token; those after them have not moved."""
    for row, (length, (begin, end)) in enumerate(
        zip(lengths, pairwise(layout.page_indptr.tolist()), strict=False)
    ):
        pages = layout.page_indices[begin:end].tolist()
        places = [page * BLOCK_SIZE + offset for page in pages for offset in range(BLOCK_SIZE)]
        kept = min(length, len(places))
        assert int(layout.slots[row]) == (places[length - 1] if length <= len(places) else NO_SLOT)
        assert int(layout.positions[row]) == kept - 1
        assert int(layout.seq_len[row]) == kept
        assert int(layout.last_page_len[row]) == kept - (len(pages) - 1) * BLOCK_SIZE
    for row in range(len(lengths), len(layout.seq_len)):
        assert int(layout.seq_len[row]) == int(layout.last_page_len[row]) == -77


def test_a_first_pass_has_the_last_two_tokens_and_the_next_ones_follow_it() -> None:
    """Drafts of other sequences than the step has, in another order; pieces beyond a sequence's blocks."""
    step = step_of([[0]] * 4, [[]] * 4, [0] * 4, fed=False)
    step.counts.copy_(ints([1, 4, 2, 3]))
    step.last.copy_(ints([*range(5, 13)]).view(4, 2))
    bases, sources = [6, 3, 11], [2, 0, 3]  # 8, 4 and 14 known tokens
    first = layout_of([2, 3, 2, 2, 3, 4, 1, 1])
    rows = rows_at([], bases, sources, shifts=(0, 17, 1))
    advance(rows, step, first, BLOCK_SIZE)
    expect_places(first, [7, 8, 3, 4, 13, 14])
    assert rows.fed.tolist() == [9, 10, 5, 6, 11, 12, *[-9] * 10]
    assert rows.lengths.tolist()[:4] == [8, 4, 14, -9]
    assert rows.positions.tolist()[:4] == [8, 4 + 17, 14 + 1, -9]

    following = layout_of([3, 1, 4, 1])
    for ahead in (1, 2, 3):
        advance(rows, None, following, BLOCK_SIZE)
        expect_places(following, [8 + ahead, 4 + ahead, 14 + ahead])
        assert rows.positions.tolist()[:4] == [8 + ahead, 21 + ahead, 15 + ahead, -9]
