"""What a plan says of its rows. Oracle: every row by itself."""

import pytest

from faser.engine.contract.plan import SequenceDelta, SequenceRows, StepDeltas, StepPlan, StepRows
from faser.types.answer import FinishReason, SequenceError, StepTrace


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


def test_the_rows_of_deltas_are_what_each_sample_was_given() -> None:
    """Oracle: the rows, written down by hand."""
    deltas = StepDeltas(
        request_ids=["a", "b", "a"],
        indices=[0, 0, 1],
        counts=[3, 0, 1],
        token_ids=[5, 6, 7, 9],
        num_cached_tokens=[16, 0, 32],
        num_preemptions=[0, 1, 0],
        first_scheduled_s=[1.5, None, 2.5],
        finish_reasons={1: FinishReason.ERROR, 2: FinishReason.STOP},
        stop_reasons={2: 9},
        errors={1: SequenceError.NONE_ALLOWED},
        traces={2: StepTrace(drafter="ngram", gamma=2, accepted=0)},
    )
    assert len(deltas) == 3
    assert list(deltas) == [
        SequenceDelta(request_id="a", index=0, token_ids=(5, 6, 7), num_cached_tokens=16, first_scheduled_s=1.5),
        SequenceDelta(
            request_id="b",
            index=0,
            token_ids=(),
            finish_reason=FinishReason.ERROR,
            num_preemptions=1,
            error=SequenceError.NONE_ALLOWED,
        ),
        SequenceDelta(
            request_id="a",
            index=1,
            token_ids=(9,),
            finish_reason=FinishReason.STOP,
            stop_reason=9,
            num_cached_tokens=32,
            first_scheduled_s=2.5,
            trace=StepTrace(drafter="ngram", gamma=2, accepted=0),
        ),
    ]
    assert not StepDeltas()
