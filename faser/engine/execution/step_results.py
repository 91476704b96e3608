"""How the model executor reports a drafting and a step to the control plane."""

from collections.abc import Mapping

from faser.engine.contract.plan import DraftPlan, Drafts, SequenceResult, SequenceRows
from faser.engine.execution.drafters.drafter import Proposals
from faser.engine.execution.sampling.rows import AcceptanceResult
from faser.types import PositionLogprobs

_NOT_SAMPLED = AcceptanceResult()


def sequence_results(
    planned: tuple[SequenceRows, ...],
    run: tuple[SequenceRows, ...],
    acceptance: Mapping[int, AcceptanceResult],
    prompt_logprobs: Mapping[int, tuple[PositionLogprobs, ...]],
) -> tuple[SequenceResult, ...]:
    """One result for each sequence of the plan, in its order.

    run: the rows of the plan as the forward returned them. acceptance, prompt_logprobs: by slot, where there are
    any.
    """
    results = []
    for before, rows in zip(planned, run, strict=True):
        slot = rows.slot
        accepted = acceptance.get(slot, _NOT_SAMPLED)
        result = SequenceResult(
            slot=slot,
            token_ids=accepted.token_ids,
            num_cut=before.num_drafts - rows.num_drafts,
            logprobs=accepted.logprobs,
            prompt_logprobs=prompt_logprobs.get(slot),
            error=accepted.error,
        )
        results.append(result)
    return tuple(results)


def drafts_of(plan: DraftPlan, proposals: Proposals, began_s: float, ended_s: float) -> Drafts:
    return Drafts(
        step=plan.step,
        drafts=proposals.drafts,
        run_s=ended_s - began_s,
        began_s=began_s,
        passes=proposals.passes,
        catchup_tokens=proposals.catchup_tokens,
        drawn=proposals.probs is not None,
    )
