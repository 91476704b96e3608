"""How the model executor reports a step to the control plane."""

from collections.abc import Mapping, Sequence

from faser.engine.contract.plan import SequenceRows, StepPlan, StepResult
from faser.engine.execution.sampling.rows import AcceptanceResult
from faser.types import PositionLogprobs

_NOT_SAMPLED = AcceptanceResult()


def step_result(
    plan: StepPlan,
    run: Sequence[SequenceRows],
    acceptance: Mapping[int, AcceptanceResult],
    prompt_logprobs: Mapping[int, tuple[PositionLogprobs, ...]],
    *,
    began_s: float,
    ended_s: float,
) -> StepResult:
    """The columns of the result.

    run: the rows of the plan as the forward returned them. acceptance, prompt_logprobs: by slot, where there are
    any.
    """
    accepted = [acceptance.get(slot, _NOT_SAMPLED) for slot in plan.rows.slots]
    cut = [before - rows.num_drafts for before, rows in zip(plan.rows.num_drafts, run, strict=True)]
    return StepResult(
        step=plan.step,
        counts=[len(each.token_ids) for each in accepted],
        token_ids=[token_id for each in accepted for token_id in each.token_ids],
        run_s=ended_s - began_s,
        began_s=began_s,
        errors={at: each.error for at, each in enumerate(accepted) if each.error is not None},
        num_cut={at: count for at, count in enumerate(cut) if count},
        logprobs={at: each.logprobs for at, each in enumerate(accepted) if each.logprobs is not None},
        prompt_logprobs={
            at: prompt_logprobs[slot] for at, slot in enumerate(plan.rows.slots) if slot in prompt_logprobs
        },
    )
