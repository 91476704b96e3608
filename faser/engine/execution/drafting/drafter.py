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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from faser.engine.contract.drafts import NO_DRAFTS, Drafts, DraftTable
from faser.engine.contract.plan import DraftPlan, SequenceStart
from faser.engine.execution.sampling.rows import DraftLayout
from faser.engine.structure.sequence_matchers import SequenceMatchers
from faser.types.arrays import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposals:
    """table, passes, catchup_tokens: as in Drafts.

    probs: [T, V] float64 on the target's device, the distribution each of the T draft tokens was sampled from,
    draft after draft; None where drafts are point masses.
    """

    table: DraftTable
    passes: int = 0
    catchup_tokens: int = 0
    probs: Tensor | None = None


class Drafter(Protocol):
    """One drafter for all slots. One call at a time; start, commit and release never while the target computes.

    The calls for a slot: start, then any number of propose and commit, then release.
    """

    @property
    def drafts_overlapped(self) -> bool:
        """Return whether it can continue unverified tokens in its own thread while the target verifies them.

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

    def commit(self, slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]) -> None:
        """Sequences continue with these tokens, drafted or not. Called after every step, also with none.

        counts: tokens of each slot, at least 1. token_ids: slot after slot.
        A draft that continued other tokens than the committed ones is void; one that continued these may still be
        accepted, in this step and in later ones.
        """
        ...

    def release(self, slot: int) -> None:
        """The slot is free. The drafter may remember the text of the sequence, but nothing by its slot."""
        ...


class NoDrafter:
    """Stands in for a Drafter in an engine that has none: it is told of sequences, and never asked for drafts."""

    drafts_overlapped = False

    def start(self, start: SequenceStart) -> None:
        """Nothing is remembered of a sequence."""

    def propose(self, plan: DraftPlan, _: Callable[[], bool] | None = None, /) -> Proposals:
        raise AssertionError(f"drafts are asked for before step {plan.step}; this engine has no drafter")

    def commit(self, slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]) -> None:
        """Nothing is remembered of tokens."""

    def release(self, slot: int) -> None:
        """Nothing was remembered by slot."""


def by_slot(
    slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Each slot with its tokens, of what a drafter is told to commit."""
    for slot, count, end in zip(slots, counts, accumulate(counts), strict=True):
        yield slot, tuple(token_ids[end - count : end])


def drafts_of(plan: DraftPlan, proposals: Proposals, began_s: float, ended_s: float) -> Drafts:
    """Return the drafts as the control plane gets them."""
    return Drafts(
        step=plan.step,
        table=proposals.table,
        run_s=ended_s - began_s,
        began_s=began_s,
        passes=proposals.passes,
        catchup_tokens=proposals.catchup_tokens,
    )


def without_forbidden(plan: DraftPlan, proposals: Proposals, matchers: SequenceMatchers) -> Proposals:
    """Drafts are cut where the grammar of their answer forbids them, before they cost a row.

    A token that is forbidden is rejected for certain. Where drafts are point masses its row is left out: the row
    before it decides the same token without it. A drawn token has to be verified even so, because its distribution
    is part of the residual that the recovered token is drawn from; there the draft ends after the token that is
    forbidden. A draft that continues unverified tokens is cut as if these were known. probs stay those
    of the longer drafts.
    """
    table, structured = proposals.table, matchers.slots
    unverified = {request.slot: request.unverified for request in plan.requests}
    num_kept_forbidden = 0 if proposals.probs is None else 1
    lengths = table.lengths.copy()
    for at, slot in enumerate(table.slots.tolist()):
        if slot in structured and lengths[at]:
            before = unverified[slot]
            most = matchers.may_draft(slot, len(before) + int(lengths[at])) - len(before)
            lengths[at] = min(lengths[at], max(most, 0))
            num_allowed = matchers.num_allowed(slot, before + table.tokens(at)[: lengths[at]]) - len(before)
            lengths[at] = min(lengths[at], max(num_allowed + num_kept_forbidden, 0))
    return replace(proposals, table=table.cut(lengths))


_NOTHING = Proposals(table=NO_DRAFTS)


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

    def drop(self) -> None:
        self._proposals = _NOTHING

    def probs(self, rows: DraftLayout) -> Tensor | None:
        """Return the distribution [T, V] float64 that each drafted token was sampled from; None: point masses.

        A sequence that the model proposed nothing for has its draft from text, with all mass on each token.
        """
        probs = self._proposals.probs
        if probs is None:
            return None
        lines = proposal_lines(rows, self._proposals.table, num_decided=self._num_decided)
        proposed = lines >= 0
        if proposed.all():
            return probs[torch.from_numpy(lines)]
        token_ids = rows.drafted[rows.verifying]
        found = probs.new_zeros(len(lines), probs.shape[1])
        found[torch.from_numpy(np.flatnonzero(proposed))] = probs[torch.from_numpy(lines[proposed])]
        found[torch.from_numpy(np.flatnonzero(~proposed)), torch.from_numpy(token_ids[~proposed])] = 1.0
        return found


def proposal_lines(rows: DraftLayout, table: DraftTable, *, num_decided: int = 0) -> Ints:
    """Return for each drafted row of a step the index [T] of its token among the tokens of all drafts in order.

    -1: the table has no draft of the row's slot. num_decided: as in ProposedDrafts.hold.
    """
    ends = np.cumsum(table.lengths)
    firsts = dict(zip(table.slots.tolist(), (ends - table.lengths + num_decided).tolist(), strict=True))
    verifying = rows.verifying
    starts = np.array([firsts.get(slot, -1) for slot in rows.slots[verifying].tolist()], dtype=np.int64)
    return np.where(starts < 0, -1, starts + rows.depth[verifying])
