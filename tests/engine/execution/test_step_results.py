"""What a step reports of each sequence, in the order of the plan."""

from faser.engine.contract.plan import Draft, DraftPlan, SequenceRows
from faser.engine.execution.drafting.drafter import Proposals
from faser.engine.execution.sampling.rows import AcceptanceResult
from faser.engine.execution.step_results import drafts_of, sequence_results
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
    found = sequence_results(planned, run, acceptance, {0: (LOGPROBS,)})
    assert [each.slot for each in found] == [3, 1, 2, 0]
    assert [each.token_ids for each in found] == [(6,), (1, 5), (), ()]
    assert [each.num_cut for each in found] == [0, 2, 0, 0]
    assert [each.error for each in found] == [None, None, SequenceError.NOT_FINITE, None]
    assert [each.logprobs for each in found] == [None, (LOGPROBS, LOGPROBS), None, None]
    assert [each.prompt_logprobs for each in found] == [None, None, None, (LOGPROBS,)]


def test_drafts_report_their_time_and_passes() -> None:
    drafts = (Draft(slot=1, method="draft_model", token_ids=(4,), confidences=(0.5,)),)
    found = drafts_of(
        DraftPlan(step=7, requests=()), Proposals(drafts=drafts, passes=2, catchup_tokens=3), 10.0, 10.5
    )
    assert (found.step, found.drafts, found.passes, found.catchup_tokens) == (7, drafts, 2, 3)
    assert (found.began_s, found.run_s) == (10.0, 0.5)
