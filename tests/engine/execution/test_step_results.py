"""What a step reports of each sequence, in the order of the plan."""

from faser.engine.contract.drafts import table_of
from faser.engine.contract.plan import DraftPlan, SequenceRows, StepPlan, StepRows
from faser.engine.execution.drafting.drafter import Proposals, drafts_of
from faser.engine.execution.sampling.rows import AcceptanceResult
from faser.engine.execution.step_results import step_result
from faser.types import PositionLogprobs, SequenceError

LOGPROBS = PositionLogprobs(token_id=5, logprob=-1.0, rank=1, top=())


def rows_of(slot: int, num_drafts: int) -> SequenceRows:
    return SequenceRows(
        slot=slot, start=0, token_ids=(1,) * (num_drafts + 1), new_blocks=(), samples=True, num_drafts=num_drafts
    )


def test_sequences_report_their_tokens_what_was_cut_of_their_drafts_and_what_failed() -> None:
    planned = (rows_of(3, 2), rows_of(1, 3), rows_of(2, 0), rows_of(0, 0))
    run = (planned[0], rows_of(1, 1), *planned[2:])
    acceptance = {
        1: AcceptanceResult(token_ids=(1, 5), logprobs=(LOGPROBS, LOGPROBS)),
        3: AcceptanceResult(token_ids=(6,)),
        2: AcceptanceResult(error=SequenceError.NOT_FINITE),
    }
    plan = StepPlan(step=1, released=(), started=(), rows=StepRows.of(*planned))
    found = step_result(plan, run, acceptance, {0: (LOGPROBS,)}, began_s=1.0, ended_s=3.0)
    assert found.by_sequence() == [(6,), (1, 5), (), ()]
    assert (found.counts, found.began_s, found.run_s) == ([1, 2, 0, 0], 1.0, 2.0)
    assert found.num_cut == {1: 2}
    assert found.errors == {2: SequenceError.NOT_FINITE}
    assert found.logprobs == {1: (LOGPROBS, LOGPROBS)}
    assert found.prompt_logprobs == {3: (LOGPROBS,)}


def test_drafts_report_their_time_and_passes() -> None:
    table = table_of([1], "draft_model", [(4,)], [(0.5,)], width=4)
    found = drafts_of(
        DraftPlan(width=4, step=7, requests=()), Proposals(table=table, passes=2, catchup_tokens=3), 10.0, 10.5
    )
    assert (found.step, found.passes, found.catchup_tokens) == (7, 2, 3)
    assert found.table is table
    assert (found.began_s, found.run_s) == (10.0, 0.5)
