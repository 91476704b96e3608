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

import numpy as np
import torch

from faser.engine.contract.drafts import joined
from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceStart
from faser.engine.execution.drafting.drafter import Drafter, Proposals, by_slot

MOST_REFRESHED = 2


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

    def commit(self, slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]) -> None:
        found: dict[Drafter, tuple[list[int], list[int], list[int]]] = {}
        for slot, tokens in by_slot(slots, counts, token_ids):
            own = found.setdefault(self._by_slot[slot], ([], [], []))
            own[0].append(slot)
            own[1].append(len(tokens))
            own[2].extend(tokens)
        for drafter, columns in found.items():
            drafter.commit(*columns)

    def release(self, slot: int) -> None:
        self._by_slot.pop(slot).release(slot)

    def _divided(self, requests: Iterable[DraftRequest]) -> dict[Drafter, list[DraftRequest]]:
        found: dict[Drafter, list[DraftRequest]] = {}
        for each in requests:
            found.setdefault(self._by_slot[each.slot], []).append(each)
        return found


def _joined(slots: Sequence[int], found: Sequence[Proposals]) -> Proposals:
    """The proposals of several versions as those of one drafter. slots: in the order of the plan."""
    table = joined([each.table for each in found])
    place = {slot: at for at, slot in enumerate(table.slots.tolist())}
    order = np.array([place[slot] for slot in slots])
    probs = [each.probs for each in found if each.probs is not None]
    if probs:
        assert len(probs) == len(found), "some versions draw their drafts, others do not"
        lines = torch.split(torch.cat(probs), table.lengths.tolist())
    return Proposals(
        table=table.take(order),
        passes=sum([each.passes for each in found]),
        catchup_tokens=sum([each.catchup_tokens for each in found]),
        probs=torch.cat([lines[at] for at in order.tolist()]) if probs else None,
    )
