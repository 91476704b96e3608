"""Drafts are cut where the grammar of their answer forbids them, before they cost a row.

A token that is forbidden is rejected for certain. Where drafts are point masses its row is left out: the row
before it decides the same token without it. A drawn token has to be judged even so, because its distribution is
part of the residual that the recovered token is drawn from; there the draft ends after the token that is
forbidden.
"""

from dataclasses import replace

from faser.engine.contract.plan import Draft, DraftPlan
from faser.engine.execution.drafters.drafter import Proposals
from faser.engine.structure.sequence_matchers import SequenceMatchers


def without_forbidden(plan: DraftPlan, proposals: Proposals, matchers: SequenceMatchers) -> Proposals:
    """The proposals with shorter drafts; their probs stay those of the longer ones.

    A draft that continues unverified tokens is judged as if these were known.
    """
    unverified = {request.slot: request.unverified for request in plan.requests}
    num_kept_forbidden = 0 if proposals.probs is None else 1
    structured = matchers.slots

    def allowed(draft: Draft) -> Draft:
        if not draft.token_ids or draft.slot not in structured:
            return draft
        before = unverified[draft.slot]
        kept = matchers.num_allowed(draft.slot, before + draft.token_ids) - len(before) + num_kept_forbidden
        if kept >= len(draft.token_ids):
            return draft
        kept = max(kept, 0)
        return replace(draft, token_ids=draft.token_ids[:kept], confidences=draft.confidences[:kept])

    return replace(proposals, drafts=tuple([allowed(draft) for draft in proposals.drafts]))
