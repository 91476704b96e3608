"""What a plan says of its rows. Oracle: every row by itself."""

import pytest

from faser.engine.contract.plan import SequenceRows, StepPlan, StepRows


@pytest.mark.parametrize(
    "sequences", [[], [(0, 1)], [(0, 256)], [(1500, 1), (64, 1)], [(1500, 17), (64, 1), (0, 30), (511, 2)]]
)
def test_tokens_of_a_plan_are_those_before_its_first_rows_and_those_before_its_further_rows(
    sequences: list[tuple[int, int]],
) -> None:
    """sequences: (start, rows) of each."""
    rows = StepRows.of(
        *(
            SequenceRows(slot=slot, start=start, token_ids=(7,) * count, new_blocks=(), samples=True)
            for slot, (start, count) in enumerate(sequences)
        )
    )
    plan = StepPlan(step=1, released=(), started=(), rows=rows)
    assert plan.kv_tokens == sum(start for start, _ in sequences)
    assert plan.kv_row_tokens == sum(start + row for start, count in sequences for row in range(1, count))
