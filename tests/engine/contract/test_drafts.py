"""Tables of drafts. Oracle: the drafts that they were made of, one by one."""

import numpy as np
import pytest

from faser.config.speculation import DRAFT_METHODS
from faser.engine.contract.drafts import METHOD_IDS, NO_DRAFTS, DraftTable, empty_table, joined, table_of
from faser.types.arrays import NO_TOKEN

WIDTH = 4
Given = tuple[int, tuple[int, ...], tuple[float, ...]]  # slot, tokens, confidences


def made(*drafts: Given, method: str = "suffix") -> DraftTable:
    slots, token_ids, confidences = zip(*drafts, strict=True) if drafts else ((), (), ())
    return table_of(slots, method, token_ids, confidences, width=WIDTH)


def padded(values: tuple[float, ...], padding: float) -> list[float]:
    return [*values, *[padding] * (WIDTH - len(values))]


@pytest.mark.parametrize(
    "drafts",
    [
        ((0, (5, 6), (0.1, 0.2)), (1, (), ()), (7, (1, 2, 3, 4), (0.3, 0.4, 0.5, 0.6))),
        ((3, (), ()),),
        (),
    ],
)
@pytest.mark.parametrize("method", DRAFT_METHODS)
def test_every_draft_has_its_line(drafts: tuple[Given, ...], method: str) -> None:
    found = made(*drafts, method=method)
    assert found.slots.tolist() == [slot for slot, _, _ in drafts]
    assert found.methods.tolist() == [METHOD_IDS[method]] * len(drafts)
    assert found.lengths.tolist() == [len(tokens) for _, tokens, _ in drafts]
    assert found.token_ids.tolist() == [padded(tokens, NO_TOKEN) for _, tokens, _ in drafts]
    assert found.confidences.tolist() == [padded(sure, 0.0) for _, _, sure in drafts]
    assert [found.tokens(at) for at in range(len(drafts))] == [tokens for _, tokens, _ in drafts]
    assert found.width == WIDTH


@pytest.mark.parametrize("at", [np.array([1]), np.array([False, True])])
def test_a_part_of_a_table_keeps_all_columns(at: np.typing.NDArray[np.int64]) -> None:
    both = joined([made((4, (1, 2), (0.1, 0.2))), made((2, (9,), (3.0,)), method="ngram")])
    one = both.take(at)
    assert [column.tolist() for column in one] == [
        column.tolist() for column in made((2, (9,), (3.0,)), method="ngram")
    ]


def test_tables_are_joined_in_their_order() -> None:
    first, second = made((4, (1, 2), (0.1, 0.2))), made((2, (9,), (3.0,)), (4, (), ()), method="ngram")
    both = joined([first, second])
    assert both.slots.tolist() == [4, 2, 4]
    assert [DRAFT_METHODS[method] for method in both.methods.tolist()] == ["suffix", "ngram", "ngram"]
    assert [both.tokens(at) for at in range(3)] == [(1, 2), (9,), ()]


def test_no_drafts_have_no_lines_and_empty_drafts_have_no_tokens() -> None:
    assert not len(NO_DRAFTS.slots)
    empty = empty_table(np.array([3, 1]), "ngram", WIDTH)
    assert empty.slots.tolist() == [3, 1]
    assert [empty.tokens(at) for at in range(2)] == [(), ()]
