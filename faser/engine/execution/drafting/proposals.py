"""What the drafter proposed for the step in progress, looked up by the rows that verify it.

The control plane may cut any draft before the step, and an overlapped step has already decided the first token of
every draft. So each drafted row has to find its line among the proposed tokens.

Drafts are cut where the grammar of their answer forbids them, before they cost a row.

A token that is forbidden is rejected for certain. Where drafts are point masses its row is left out: the row
before it decides the same token without it. A drawn token has to be judged even so, because its distribution is
part of the residual that the recovered token is drawn from; there the draft ends after the token that is
forbidden.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.contract.plan import Draft, DraftPlan, SequenceRows
from faser.engine.execution.drafting.drafter import Proposals
from faser.engine.execution.drafting.text import with_text_drafts
from faser.engine.structure.sequence_matchers import SequenceMatchers


class ProposedDrafts:
    """Holds the proposals of one drafting until the step that verifies them is over."""

    def __init__(self) -> None:
        self._proposals: Proposals | None = None
        self._num_decided = 0

    def hold(self, proposals: Proposals, *, num_decided: int = 0) -> None:
        """num_decided: leading tokens of every draft that are already accepted or refused when it is verified."""
        self._proposals, self._num_decided = proposals, num_decided

    def add_from_text(self, rows: Sequence[SequenceRows]) -> None:
        """The model proposed for some sequences only; the drafted rows of the others are copied from text."""
        if self._proposals is not None:
            self._proposals = with_text_drafts(self._proposals, rows, num_decided=self._num_decided)

    def drop(self) -> None:
        self._proposals = None

    def probs(self, rows: Sequence[SequenceRows]) -> Tensor | None:
        """[T, V] float64, the distribution that each drafted row's token was sampled from; None: point masses."""
        if self._proposals is None or self._proposals.probs is None:
            return None
        return self._proposals.probs[self._lines(rows, self._proposals)]

    def top_ids(self, rows: Sequence[SequenceRows]) -> Tensor | None:
        """[T, M] int64, likely tokens at each drafted row's place; None where the drafter named none."""
        if self._proposals is None or self._proposals.top_ids is None:
            return None
        return self._proposals.top_ids[self._lines(rows, self._proposals)]

    def _lines(self, rows: Sequence[SequenceRows], proposals: Proposals) -> Tensor:
        return torch.from_numpy(proposal_lines(rows, proposals.drafts, num_decided=self._num_decided))


def proposal_lines(
    rows: Sequence[SequenceRows], drafts: Sequence[Draft], *, num_decided: int = 0
) -> NDArray[np.int64]:
    """[T] for each drafted row of a step, the index of its token among the tokens of all drafts in order.

    rows: each one with drafted tokens has a draft of the same slot. num_decided: as in ProposedDrafts.hold.
    """
    lengths = np.fromiter((len(each.token_ids) for each in drafts), np.int64, len(drafts))
    firsts = dict(zip((each.slot for each in drafts), (np.cumsum(lengths) - lengths).tolist(), strict=True))
    drafting = [each for each in rows if each.num_drafts]
    counts = np.fromiter((each.num_drafts for each in drafting), np.int64, len(drafting))
    starts = np.fromiter((firsts[each.slot] + num_decided for each in drafting), np.int64, len(drafting))
    return np.arange(counts.sum()) + np.repeat(starts - np.cumsum(counts) + counts, counts)


def without_forbidden(plan: DraftPlan, proposals: Proposals, matchers: SequenceMatchers) -> Proposals:
    """The proposals with shorter drafts; their probs and top_ids stay those of the longer ones.

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
