"""Graph batch sizes: which are captured, and which of them a step is padded to."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.engine.execution.runner.graph_sizes import BatchSizeIndex, GraphSizes, StepSizes, next_size
from faser.kernels.interface.graph_capture import GraphBatchSize


def test_batch_sizes_are_bounded_and_take_every_step_of_their_sizes() -> None:
    sizes = GraphSizes.default(max_rows=256, max_sequences=100, max_drafts=5, max_blocks_each=8)
    assert sizes.rows == (
        *(1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 100, 128),
        *(144, 160, 176, 192, 208, 224, 240, 256),
    )
    assert GraphBatchSize(rows=100, sequences=100, one_row_each=True) in sizes.batch_sizes
    assert GraphBatchSize(rows=128, sequences=100, one_row_each=False) in sizes.batch_sizes
    assert all(each.rows <= 100 for each in sizes.batch_sizes if each.one_row_each)
    assert GraphSizes.default(
        max_rows=8192, max_sequences=64, max_drafts=0, max_blocks_each=8, requested=(4, 1, 4)
    ).rows == (1, 4)


def test_the_smallest_size_with_room_for_rows_and_sequences_is_taken() -> None:
    index = BatchSizeIndex(GraphSizes(rows=(2, 4, 8), max_sequences=3, max_blocks_each=4), one_row_each=False)
    assert index.fitting(2, 1) == GraphBatchSize(rows=2, sequences=1, one_row_each=False)
    assert index.fitting(2, 2) == GraphBatchSize(rows=4, sequences=3, one_row_each=False)
    assert index.fitting(8, 3) == GraphBatchSize(rows=8, sequences=3, one_row_each=False)
    assert index.fitting(8, 4) is None
    assert index.fitting(9, 1) is None


def test_steps_of_more_rows_than_sequences_have_sizes_for_equal_numbers_of_rows() -> None:
    sizes = GraphSizes.default(max_rows=8192, max_sequences=64, max_drafts=4, max_blocks_each=8)
    uniform = {(each.sequences, each.rows_each) for each in sizes.batch_sizes if each.rows_each is not None}
    assert (64, 5) in uniform
    assert {each for _, each in uniform} == {2, 3, 4, 5}
    assert all(64 < count * each <= 320 for count, each in uniform if each is not None)
    assert len(uniform) <= 32
    index = BatchSizeIndex(sizes, one_row_each=False, rows_each=5)
    assert index.fitting(300, 60) == GraphBatchSize(rows=320, sequences=64, one_row_each=False, rows_each=5)
    assert index.fitting(325, 65) is None


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 48, 64, 200, 256])
@pytest.mark.parametrize("requested", [None, (4, 8), (2, 100)])
def test_every_step_of_no_more_rows_than_the_largest_size_has_one(
    slots: int, requested: tuple[int, ...] | None
) -> None:
    sizes = GraphSizes.default(
        max_rows=8192, max_sequences=slots, max_drafts=4, max_blocks_each=8, requested=requested
    )
    single, several = (BatchSizeIndex(sizes, one_row_each=each) for each in (True, False))
    for rows in range(1, sizes.rows[-1] + 1):
        for sequences in {each for each in (1, 2, rows // 5, rows - 1, rows) if 1 <= each <= min(rows, slots)}:
            found = several.fitting(rows, sequences) or (rows == sequences and single.fitting(rows, rows))
            assert found, (rows, sequences)


def test_no_large_step_is_padded_by_more_than_an_eighth() -> None:
    sizes = GraphSizes.default(max_rows=8192, max_sequences=256, max_drafts=4, max_blocks_each=8)
    several = BatchSizeIndex(sizes, one_row_each=False)
    for rows in range(128, 513):
        found = several.fitting(rows, 40)
        assert found is not None
        assert found.rows < 1.13 * rows


@pytest.mark.parametrize("max_drafts, most", [(0, 45), (1, 75), (4, 120), (16, 130)])
def test_the_graphs_of_a_model_are_a_bounded_number_and_take_bounded_memory(max_drafts: int, most: int) -> None:
    sizes = GraphSizes.default(
        max_rows=8192, max_sequences=256, max_drafts=max_drafts, max_blocks_each=8, tile_rows=(4, 16)
    )
    assert len(sizes.batch_sizes) <= most
    assert sizes.expected_bytes(num_kinds=1) < 576 << 20


@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=256),
    max_sequences=st.sampled_from([1, 5, 48, 64, 256]),
    max_drafts=st.sampled_from([0, 1, 4, 16]),
    tiles=st.sampled_from([(), (4, 16), (2, 8), (16, 64), (8,)]),
)
def test_a_step_takes_the_narrowest_tile_that_holds_the_rows_of_each_sequence(
    counts: list[int], max_sequences: int, max_drafts: int, tiles: tuple[int, ...]
) -> None:
    """And is padded to the next number of rows whatever its tile. Oracle: the sizes by rows alone."""
    sizes = GraphSizes.default(
        max_rows=8192, max_sequences=max_sequences, max_drafts=max_drafts, max_blocks_each=8, tile_rows=tiles
    )
    counts = counts[:max_sequences]
    found = StepSizes(sizes).fitting(np.array(counts, dtype=np.int32))
    rows = sum(counts)
    if rows > sizes.rows[-1]:
        assert found is None or found.rows_each == counts[0]
        return
    assert found is not None
    assert found.rows <= min(each for each in sizes.rows if each >= rows)
    assert found.sequences >= len(counts)
    if found.tile_rows is not None:
        held = [each for each in sizes.tile_rows if each is not None and each >= max(counts)]
        assert found.tile_rows == min(held, default=sizes.tile_rows[-1])


def test_full_loads_that_draft_alike_have_sizes_beyond_those_of_other_steps() -> None:
    sizes = StepSizes(GraphSizes.default(max_rows=8192, max_sequences=256, max_drafts=4, max_blocks_each=8))
    for sequences, each in ((128, 5), (200, 4), (180, 5), (256, 3)):
        found = sizes.fitting(np.full(sequences, each, dtype=np.int32))
        assert found is not None, (sequences, each)
        assert found.rows_each == each
        assert found.rows < 1.25 * sequences * each
    assert sizes.fitting(np.array([4] * 127 + [5], dtype=np.int32)) is None


def test_padding_of_equal_rows_fits_into_a_block() -> None:
    sizes = GraphSizes.default(max_rows=8192, max_sequences=64, max_drafts=9, max_blocks_each=8, block_size=4)
    assert sizes.max_rows_each == 4


def test_the_next_size_is_the_smallest_that_is_large_enough() -> None:
    assert [next_size((1, 4, 8), count) for count in (1, 2, 4, 8, 9)] == [1, 4, 4, 8, None]
