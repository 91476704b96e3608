"""Graph batch sizes: which are captured, and which of them a step is padded to."""

from faser.engine.execution.cuda_graphs.batch_sizes import BatchSizeIndex, GraphSizes, next_size
from faser.kernels.interface.graph_capture import GraphBatchSize


def test_batch_sizes_are_bounded_and_take_every_step_of_their_sizes() -> None:
    sizes = GraphSizes.default(max_rows=256, max_sequences=100, max_drafts=5, max_blocks_each=8)
    assert sizes.rows == (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 100, 128, 192, 256)
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
    assert len(uniform) < 20
    assert not any(each.rows_each for each in sizes.for_lanes().batch_sizes)
    index = BatchSizeIndex(sizes, one_row_each=False, rows_each=5)
    assert index.fitting(300, 60) == GraphBatchSize(rows=320, sequences=64, one_row_each=False, rows_each=5)
    assert index.fitting(325, 65) is None


def test_padding_of_equal_rows_fits_into_a_block() -> None:
    sizes = GraphSizes.default(max_rows=8192, max_sequences=64, max_drafts=9, max_blocks_each=8, block_size=4)
    assert sizes.max_rows_each == 4


def test_the_next_size_is_the_smallest_that_is_large_enough() -> None:
    assert [next_size((1, 4, 8), count) for count in (1, 2, 4, 8, 9)] == [1, 4, 4, 8, None]
