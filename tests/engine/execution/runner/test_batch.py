"""The block table and the row arrays that every step is made of."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.engine.contract.plan import SequenceRows, StepRows
from faser.engine.execution.runner.batch import BlockTable


def rows(slot: int, start: int, token_ids: tuple[int, ...], *new_blocks: int) -> SequenceRows:
    return SequenceRows(slot=slot, start=start, token_ids=token_ids, new_blocks=new_blocks, samples=True)


def test_rows_of_several_sequences_are_laid_out_in_plan_order() -> None:
    table = BlockTable(4, 8)
    table.append(2, (5, 6))
    table.append(0, (9,))
    batch = table.gather(StepRows.of(rows(2, 17, (70, 71, 72)), rows(0, 3, (80,))))
    assert batch.token_ids.tolist() == [70, 71, 72, 80]
    assert batch.layout.query_start.tolist() == [0, 3, 4]
    assert batch.layout.positions.tolist() == [17, 18, 19, 3]
    assert batch.layout.seq_len.tolist() == [20, 4]
    assert batch.layout.block_table[0].tolist() == [5, 6]
    assert batch.layout.block_table[1, 0] == 9
    assert batch.last_rows.tolist() == [2, 3]


def test_a_cleared_slot_starts_over() -> None:
    table = BlockTable(1, 4)
    table.append(0, (1, 2, 3))
    table.clear(0)
    table.append(0, (7,))
    assert table.gather(StepRows.of(rows(0, 0, (1,)))).layout.block_table.tolist() == [[7]]


def test_more_blocks_than_the_table_holds_are_a_bug_that_shows() -> None:
    table = BlockTable(1, 2)
    with pytest.raises(ValueError):
        table.append(0, (1, 2, 3))


def test_blocks_of_a_slot_come_back_in_order_of_position() -> None:
    table = BlockTable(2, 4)
    table.append(1, (5, 3))
    table.append(1, (9,))
    assert table.blocks(1) == [5, 3, 9]
    assert table.blocks(0) == []


def test_rows_given_as_arrays_are_laid_out_like_those_of_a_plan() -> None:
    table = BlockTable(3, 4)
    table.append(2, (5, 6))
    table.append(0, (9,))
    plan = table.gather(StepRows.of(rows(2, 17, (70, 71)), rows(0, 3, (80,))))
    starts, counts = np.array([17, 3], dtype=np.int32), np.array([2, 1], dtype=np.int32)
    batch = table.lay_out([2, 0], starts, counts, np.array([70, 71, 80]))
    assert batch.token_ids.equal(plan.token_ids)
    for name in ("query_start", "seq_len", "positions", "block_table"):
        assert getattr(batch.layout, name).equal(getattr(plan.layout, name)), name
    assert batch.last_rows.tolist() == plan.last_rows.tolist()


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=8))
def test_positions_are_consecutive_within_every_sequence(spans: list[tuple[int, int]]) -> None:
    """Oracle: the plain loop."""
    table = BlockTable(len(spans), 3)
    for slot in range(len(spans)):
        table.append(slot, (slot,))
    plan = [rows(slot, start, tuple(range(count))) for slot, (start, count) in enumerate(spans)]
    batch = table.gather(StepRows.of(*plan))
    expected = [position for start, count in spans for position in range(start, start + count)]
    assert batch.layout.positions.tolist() == expected
    assert batch.layout.positions.numpy().dtype == np.int32
    assert batch.layout.seq_len.tolist() == [start + count for start, count in spans]
