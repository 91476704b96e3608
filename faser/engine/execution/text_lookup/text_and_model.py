"""TextAndModel: the text look-up and a draft model in one engine (method `auto`), each asked by plans of its own.

The control plane chooses between their drafts. So the model has proposals for a part of the sequences only; where
a step needs a line for every drafted token, with_text_drafts adds those from text.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

import torch

from faser.engine.contract.plan import PLACEHOLDER, Draft, DraftPlan, SequenceRows, SequenceStart
from faser.engine.execution.drafters.drafter import Continuation, Drafter, Proposals
from faser.engine.execution.text_lookup.lookup import TextLookup


class TextAndModel:
    """A Drafter. model: None where text drafts alone."""

    def __init__(self, text: TextLookup, model: Drafter | None = None) -> None:
        self._text = text
        self.model = model

    @property
    def drafts_overlapped(self) -> bool:
        return self._text.drafts_overlapped and (self.model is None or self.model.drafts_overlapped)

    def start(self, start: SequenceStart) -> None:
        self._text.start(start)
        if self.model is not None:
            self.model.start(start)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        if plan.from_text:
            return Proposals(drafts=tuple(chain.from_iterable(self._text.look_up(plan))))
        if not plan.requests:
            return Proposals(drafts=())
        assert self.model is not None, "requests are left to a draft model, and there is none"
        return self.model.propose(plan, until)

    def commit(self, continuations: Sequence[Continuation]) -> None:
        self._text.commit(continuations)
        if self.model is not None:
            self.model.commit(continuations)

    def release(self, slot: int) -> None:
        self._text.release(slot)
        if self.model is not None:
            self.model.release(slot)


def with_text_drafts(proposals: Proposals, rows: Sequence[SequenceRows], *, num_decided: int) -> Proposals:
    """What the model proposed, and after it the drafts of all other rows of a step: these are from text.

    num_decided: leading tokens of each draft that are known by now, so that the step has no rows for them.
    """
    if proposals.probs is None:
        return proposals
    by_model = {draft.slot for draft in proposals.drafts}
    passed = (PLACEHOLDER,) * num_decided
    others = [
        Draft(slot=each.slot, method="", token_ids=passed + each.token_ids[-each.num_drafts :])
        for each in rows
        if each.num_drafts and each.slot not in by_model
    ]
    return with_point_masses(proposals, others) if others else proposals


def with_point_masses(proposals: Proposals, others: Sequence[Draft]) -> Proposals:
    """proposals, and after them drafts that are point masses.

    probs gets a row for each token with all its mass on it; where it is None, it stays so.
    """
    probs = proposals.probs
    token_ids = [token_id for draft in others for token_id in draft.token_ids]
    if probs is not None:
        certain = probs.new_zeros(len(token_ids), probs.shape[1])
        certain[range(len(token_ids)), token_ids] = 1.0
        probs = torch.cat((probs, certain))
    return replace(proposals, drafts=(*proposals.drafts, *others), probs=probs)
