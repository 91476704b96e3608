"""HeadVersions: the head that an engine began with, and refreshed versions of it that came while it ran.

    sequence     starts ............................... ends
    its head     the newest one then; it keeps that one        whatever is adopted meanwhile
    namespace    the first one, always

Keys and values that a head has drawn are its own, so a sequence never changes its head. A refreshed head has
learned from the texts of clients who share a cache; how well it drafts says something about these texts. So it
never drafts for a sequence with a namespace, whose client shares nothing with others.

A version ends with its last sequence, unless it is the first or the newest one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceStart
from faser.engine.execution.drafting.drafter import Continuation, Drafter, Proposals

MOST_REFRESHED = 2

_Each = TypeVar("_Each", DraftRequest, Continuation)


class HeadVersions:
    """A Drafter. make: the drafter of the head in a directory, over the states and the cache of the first one."""

    drafts_overlapped = False

    def __init__(self, first: Drafter, make: Callable[[Path], Drafter]) -> None:
        self._first = self._newest = first
        self._make = make
        self._by_slot: dict[int, Drafter] = {}

    @property
    def num_refreshed(self) -> int:
        """Refreshed versions that are in memory."""
        return len({*self._by_slot.values(), self._newest} - {self._first})

    def adopt(self, directory: Path) -> bool:
        """Let the head in directory draft for sequences that start from now on, unless they have a namespace.

        False and unchanged while MOST_REFRESHED versions are in memory. Raises ModelError for a head that does not
        fit.
        """
        if self.num_refreshed >= MOST_REFRESHED:
            return False
        self._newest = self._make(directory)
        return True

    def start(self, start: SequenceStart) -> None:
        drafter = self._by_slot[start.slot] = self._newest if start.namespace is None else self._first
        drafter.start(start)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        parts = self._divided(plan.requests)
        if len(parts) == 1:
            return next(iter(parts)).propose(plan, until)
        found = [drafter.propose(replace(plan, requests=tuple(own)), until) for drafter, own in parts.items()]
        return _joined([each.slot for each in plan.requests], found)

    def commit(self, continuations: Sequence[Continuation]) -> None:
        for drafter, own in self._divided(continuations).items():
            drafter.commit(own)

    def release(self, slot: int) -> None:
        self._by_slot.pop(slot).release(slot)

    def _divided(self, items: Iterable[_Each]) -> dict[Drafter, list[_Each]]:
        found: dict[Drafter, list[_Each]] = {}
        for each in items:
            found.setdefault(self._by_slot[each.slot], []).append(each)
        return found


def _joined(slots: Sequence[int], found: Sequence[Proposals]) -> Proposals:
    """The proposals of several versions as those of one drafter. slots: in the order of the plan."""
    drafts = {draft.slot: draft for each in found for draft in each.drafts}
    return Proposals(
        drafts=tuple([drafts[slot] for slot in slots]),
        passes=sum([each.passes for each in found]),
        catchup_tokens=sum([each.catchup_tokens for each in found]),
        probs=_lines(slots, [(each, each.probs) for each in found]),
    )


def _lines(slots: Sequence[int], found: Sequence[tuple[Proposals, Tensor | None]]) -> Tensor | None:
    """Lines of draft tokens, [T, …] of each proposal, in the order of the plan; None where none has any."""
    by_slot: dict[int, Tensor] = {}
    for proposals, lines in found:
        if lines is not None:
            lengths = [len(draft.token_ids) for draft in proposals.drafts]
            by_slot |= zip([draft.slot for draft in proposals.drafts], torch.split(lines, lengths), strict=True)
    return torch.cat([by_slot[slot] for slot in slots if slot in by_slot]) if by_slot else None
