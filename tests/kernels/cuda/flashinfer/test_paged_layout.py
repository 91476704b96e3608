"""Pages of a step, against a loop over sequences and positions.

Bugs these tests have been seen to catch: the last page's length one short, a page more for a sequence that ends
with its page, the index of pages shifted by one, a slot of another block, padding that stores, rows of the layout
before that stay.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from faser.kernels.cuda.flashinfer.paged_layout import (
    NO_SLOT,
    LayoutSizes,
    LayoutWriter,
    PagedLayout,
    layout_within,
    paged_layout,
)
from faser.kernels.interface.shapes import RowLayout
from tests.kernels.layouts import Span, layout_of, shuffled_table

BLOCK_SIZES = (1, 4, 16)
NOWHERE = -1000  # what a table holds past the end of a sequence


def empty(count: int) -> Tensor:
    return torch.full((count,), -7, dtype=torch.int32)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[RowLayout, int]:
    """A layout of one to five sequences, and its block size."""
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    sizes = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=5))
    spans = [Span(sequence=s, start=start, rows=rows) for s, (start, rows) in enumerate(sizes)]
    table = shuffled_table(len(spans), 50)
    for span in spans:
        table[span.sequence, -(-(span.start + span.rows) // block_size) :] = NOWHERE
    return layout_of(spans, table), block_size


def check(found: PagedLayout, layout: RowLayout, block_size: int) -> None:
    """Every array, spelled out."""
    pages, last = [], []
    page_starts, slots = [0], []
    for sequence, length in enumerate(layout.seq_len.tolist()):
        used = [layout.block_table[sequence, at].item() for at in range((length - 1) // block_size + 1)]
        pages += used
        page_starts.append(len(pages))
        last.append(1 + (length - 1) % block_size)
        first, end = layout.query_start[sequence : sequence + 2].tolist()
        slots += [
            used[position // block_size] * block_size + position % block_size
            for position in layout.positions[first:end].tolist()
        ]
    assert found.page_indices.tolist() == pages
    assert found.page_indptr.tolist() == page_starts
    assert found.last_page_len.tolist() == last
    assert found.slots.tolist() == slots
    assert found.query_indptr.tolist() == layout.query_start.tolist()
    assert found.seq_len.tolist() == layout.seq_len.tolist()
    assert found.positions.tolist() == layout.positions.tolist()


@given(layouts())
def test_every_position_is_found_on_its_page(case: tuple[RowLayout, int]) -> None:
    layout, block_size = case
    check(paged_layout(layout, block_size, empty), layout, block_size)


@given(layouts())
def test_one_copy_of_the_buffer_carries_every_array(case: tuple[RowLayout, int]) -> None:
    layout, block_size = case
    found = paged_layout(layout, block_size, empty)
    copy = found.within(found.packed.clone())
    found.packed.fill_(NOWHERE)
    check(copy, layout, block_size)


@given(layouts())
def test_no_array_starts_off_a_boundary_of_16_bytes(case: tuple[RowLayout, int]) -> None:
    layout, block_size = case
    found = paged_layout(layout, block_size, empty)
    arrays = (found.page_indptr, found.page_indices, found.last_page_len, found.slots, found.positions)
    assert all(each.storage_offset() * each.itemsize % 16 == 0 for each in arrays)


@pytest.mark.parametrize("rows, wanted", [((1, 1, 1), True), ((1, 2, 1), False), ((3,), False)])
def test_plain_decoding_is_one_row_each(rows: tuple[int, ...], wanted: bool) -> None:
    spans = [Span(sequence=s, start=5, rows=count) for s, count in enumerate(rows)]
    layout = layout_of(spans, shuffled_table(len(spans), 3))
    assert paged_layout(layout, 4, empty).one_row_each is wanted


def test_a_table_that_is_too_narrow_is_our_own_mistake() -> None:
    layout = layout_of([Span(sequence=0, start=8, rows=1)], shuffled_table(1, 2))
    with pytest.raises(AssertionError, match="3 blocks are read of 2"):
        paged_layout(layout, 4, empty)


def padded(layout: RowLayout, block_size: int, sizes: LayoutSizes, *, one_row_each: bool) -> PagedLayout:
    found = layout_within(empty(sizes.numbers), sizes)
    LayoutWriter(found, block_size, one_row_each=one_row_each).fill(layout)
    return found


@given(case=layouts(), more=st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 9)))
def test_padding_follows_the_layout_and_stores_nothing(
    case: tuple[RowLayout, int], more: tuple[int, int, int]
) -> None:
    layout, block_size = case
    tight = paged_layout(layout, block_size, empty).sizes
    rows, sequences, pages = more
    sizes = LayoutSizes(
        rows=tight.rows + rows, sequences=tight.sequences + sequences, pages=tight.pages + sequences + pages
    )
    found = padded(layout, block_size, sizes, one_row_each=False)
    used = tight.pages + sequences
    check(
        PagedLayout(
            packed=found.packed,
            query_indptr=found.query_indptr[: tight.sequences + 1],
            page_indptr=found.page_indptr[: tight.sequences + 1],
            page_indices=found.page_indices[: tight.pages],
            last_page_len=found.last_page_len[: tight.sequences],
            seq_len=found.seq_len[: tight.sequences],
            positions=found.positions[: tight.rows],
            slots=found.slots[: tight.rows],
        ),
        layout,
        block_size,
    )
    assert found.query_indptr[tight.sequences :].tolist() == [tight.rows] * (sequences + 1)
    assert found.page_indptr[tight.sequences :].tolist() == list(range(tight.pages, used + 1))
    assert found.page_indices[tight.pages : used].tolist() == [0] * sequences
    assert found.last_page_len[tight.sequences :].tolist() == [1] * sequences
    assert found.seq_len[tight.sequences :].tolist() == [1] * sequences
    assert found.positions[tight.rows :].tolist() == [0] * rows
    assert found.slots[tight.rows :].tolist() == [NO_SLOT] * rows


@given(cases=st.lists(layouts(), min_size=2, max_size=4))
def test_nothing_is_left_of_the_layout_before(cases: list[tuple[RowLayout, int]]) -> None:
    """Oracle: arrays that nothing was written to. Unused pages may hold anything."""
    sizes = LayoutSizes(rows=60, sequences=7, pages=300)
    writers, used = {}, {size: layout_within(empty(sizes.numbers), sizes) for size in BLOCK_SIZES}
    for size, target in used.items():
        writers[size] = LayoutWriter(target, size, one_row_each=False)
    for layout, block_size in cases:
        num_read = writers[block_size].fill(layout)
        fresh = padded(layout, block_size, sizes, one_row_each=False)
        for name in ("query_indptr", "page_indptr", "last_page_len", "seq_len", "positions", "slots"):
            assert torch.equal(getattr(used[block_size], name), getattr(fresh, name)), name
        assert torch.equal(used[block_size].packed[:num_read], fresh.packed[:num_read])


@given(starts=st.lists(st.integers(0, 60), min_size=1, max_size=6), block_size=st.sampled_from(BLOCK_SIZES))
def test_one_row_each_is_laid_out_like_rows_of_any_number(starts: list[int], block_size: int) -> None:
    spans = [Span(sequence=s, start=start, rows=1) for s, start in enumerate(starts)]
    layout = layout_of(spans, shuffled_table(len(spans), 61))
    check(paged_layout(layout, block_size, empty), layout, block_size)


@given(case=layouts(), more=st.tuples(st.integers(0, 3), st.integers(0, 9)))
def test_what_is_read_lies_at_the_beginning_of_the_buffer(
    case: tuple[RowLayout, int], more: tuple[int, int]
) -> None:
    """And nothing less: pages end it, those of sequences that are not there among them."""
    layout, block_size = case
    sequences, pages = more
    tight = paged_layout(layout, block_size, empty).sizes
    sizes = LayoutSizes(
        rows=tight.rows, sequences=tight.sequences + sequences, pages=tight.pages + sequences + pages
    )
    found = layout_within(empty(sizes.numbers), sizes)
    num_read = LayoutWriter(found, block_size, one_row_each=False).fill(layout)
    sent = torch.full_like(found.packed, NOWHERE)
    sent[:num_read] = found.packed[:num_read]
    arrived = found.within(sent)
    used = tight.pages + sequences
    assert arrived.page_indices[:used].tolist() == found.page_indices[:used].tolist()
    assert arrived.page_indices[used:].tolist() == [NOWHERE] * pages
    for name in ("query_indptr", "page_indptr", "last_page_len", "seq_len", "positions", "slots"):
        assert torch.equal(getattr(arrived, name), getattr(found, name)), name


def test_sequences_that_are_not_there_have_a_row_each_where_all_have_one() -> None:
    layout = layout_of([Span(sequence=s, start=5, rows=1) for s in range(2)], shuffled_table(2, 3))
    found = padded(layout, 4, LayoutSizes(rows=5, sequences=5, pages=9), one_row_each=True)
    assert found.query_indptr.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "rows, sequences, pages, problem",
    [
        (2, 3, 9, "3 rows do not fit into 2"),
        (3, 1, 9, "2 sequences do not fit into 1"),
        (4, 3, 4, "4 blocks and 1 for padding; there is room for 4"),
    ],
)
def test_what_does_not_fit_is_our_own_mistake(rows: int, sequences: int, pages: int, problem: str) -> None:
    spans = [Span(sequence=0, start=5, rows=1), Span(sequence=1, start=4, rows=2)]
    layout = layout_of(spans, shuffled_table(2, 2))
    with pytest.raises(AssertionError, match=problem):
        padded(layout, 4, LayoutSizes(rows=rows, sequences=sequences, pages=pages), one_row_each=False)
