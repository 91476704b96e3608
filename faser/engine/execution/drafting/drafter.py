"""The Drafter protocol, and its proposals until they are verified.

A drafter belongs to the data plane and is the only owner of what it remembers of a slot. A proposal depends on
the tokens of its sequence alone, never on other sequences in the batch, so a greedy draft is a point mass and may
be cut anywhere. Of acceptance results a drafter sees only the committed tokens.

While the target verifies a draft, the next one can be made: it continues DraftRequest.unverified as if known.

    position      0 ...... n - 1 | n ... n + c - 1            | n + c ............
    this step     known          | unverified: being verified | drafted meanwhile
    the next one  known: the accepted ones of the unverified tokens, then a bonus or recovered token, which may or
                  may not be the first token of the new draft
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.contract.plan import PLACEHOLDER, Draft, DraftPlan, SequenceRows, SequenceStart
from faser.engine.structure.sequence_matchers import SequenceMatchers


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposals:
    """drafts: in the order of the plan's requests. passes, catchup_tokens: as in Drafts.

    probs: [T, V] float64 on the target's device, the distribution each of the T draft tokens was sampled from,
    draft after draft; None where drafts are point masses.
    """

    drafts: tuple[Draft, ...]
    passes: int = 0
    catchup_tokens: int = 0
    probs: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class Continuation:
    """Tokens that a step committed to the sequence in slot. num_accepted: of them, leading accepted draft tokens.

    Read only, and not frozen: see engine/contract/plan.py.
    """

    slot: int
    token_ids: tuple[int, ...]
    num_accepted: int = 0


class Drafter(Protocol):
    """One drafter for all slots. One call at a time; start, commit and release never while the target computes.

    The calls for a slot: start, then any number of propose and commit, then release.
    """

    @property
    def drafts_overlapped(self) -> bool:
        """Whether it can continue unverified tokens, in a thread of its own, while the target verifies them.

        False where it computes with the target's KV cache, and where drafts are not point masses: the first token
        of an overlapped draft is accepted by being equal to the bonus token, which holds for point masses only.
        """
        ...

    def start(self, start: SequenceStart) -> None:
        """A sequence with its known tokens takes over a free slot. Its prompt is computed in later steps."""
        ...

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        """Drafts for every request. The block table holds their blocks. Changes no sequence's tokens.

        A request with unverified tokens gets the draft that it would get if they were known. Only where
        drafts_overlapped; such a call may run concurrently with the target's forward, so of all that the drafter
        does not own it reads the block table alone. until: asked between passes; True ends all drafts.
        """
        ...

    def commit(self, continuations: Sequence[Continuation]) -> None:
        """Sequences continue with these tokens, drafted or not. Called after every step, also with none.

        A draft that continued other tokens than the committed ones is void; one that continued these may still be
        accepted, in this step and in later ones.
        """
        ...

    def release(self, slot: int) -> None:
        """The slot is free. The drafter may remember the text of the sequence, but nothing by its slot."""
        ...


def one_each(plan: DraftPlan, method: str, drafts: Mapping[int, Draft]) -> tuple[Draft, ...]:
    """A draft for every request, in their order. drafts: by slot; where there is none, an empty one."""
    return tuple([drafts.get(each.slot) or Draft(slot=each.slot, method=method) for each in plan.requests])


def without_forbidden(plan: DraftPlan, proposals: Proposals, matchers: SequenceMatchers) -> Proposals:
    """Drafts are cut where the grammar of their answer forbids them, before they cost a row.

    A token that is forbidden is rejected for certain. Where drafts are point masses its row is left out: the row
    before it decides the same token without it. A drawn token has to be verified even so, because its distribution
    is part of the residual that the recovered token is drawn from; there the draft ends after the token that is
    forbidden. A draft that continues unverified tokens is cut as if these were known. probs stay those
    of the longer drafts.
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


_NOTHING = Proposals(drafts=())


class ProposedDrafts:
    """Holds the proposals of one drafting until the step that verifies them is over.

    The control plane may cut any draft before the step, and an overlapped step has already decided the first token
    of every draft. So each drafted row has to find its line among the proposed tokens.
    """

    def __init__(self) -> None:
        self._proposals, self._num_decided = _NOTHING, 0

    def hold(self, proposals: Proposals, *, num_decided: int = 0) -> None:
        """num_decided: leading tokens of every draft that are already accepted or refused when it is verified."""
        self._proposals, self._num_decided = proposals, num_decided

    def add_from_text(self, rows: Sequence[SequenceRows]) -> None:
        """The model proposed for some sequences only; the drafted rows of the others are copied from text."""
        self._proposals = with_text_drafts(self._proposals, rows, num_decided=self._num_decided)

    def drop(self) -> None:
        self._proposals = _NOTHING

    def probs(self, rows: Sequence[SequenceRows]) -> Tensor | None:
        """[T, V] float64, the distribution that each drafted row's token was sampled from; None: point masses."""
        probs = self._proposals.probs
        return None if probs is None else probs[self._lines(rows)]

    def _lines(self, rows: Sequence[SequenceRows]) -> Tensor:
        return torch.from_numpy(proposal_lines(rows, self._proposals.drafts, num_decided=self._num_decided))


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
