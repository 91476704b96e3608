"""The TextLookup protocol: drafts copied from text by several methods at once.

What a look-up costs decides whether speculation pays with small models, so one call asks all methods for all
requests. LookupDrafter makes a Drafter of a look-up with one method; CombinedLookup makes one look-up of several.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Protocol

from faser.engine.contract.plan import Draft, DraftPlan, SequenceStart
from faser.engine.execution.drafters.drafter import Continuation, Drafter, Proposals

_token_ids = attrgetter("token_ids")


class TextLookup(Protocol):
    """All methods of drafting from text. Its calls, and their order, are those of a Drafter."""

    @property
    def num_methods(self) -> int: ...

    @property
    def drafts_overlapped(self) -> bool:
        """As a Drafter's; True only if it holds for all methods."""
        ...

    def start(self, start: SequenceStart) -> None: ...

    def look_up(self, plan: DraftPlan) -> tuple[tuple[Draft, ...], ...]:
        """For each method a draft for every request, in their order. Otherwise as Drafter.propose.

        An occasional method that has no draft for any of them is left out, unless it is the only one.
        """
        ...

    def commit(self, continuations: Sequence[Continuation]) -> None: ...

    def release(self, slot: int) -> None: ...


class CombinedLookup:
    """A TextLookup: the methods of native, if it is given, then one method for each drafter.

    occasional: drafters of further methods, which have nothing for most requests.
    """

    def __init__(
        self, drafters: Sequence[Drafter], native: TextLookup | None = None, occasional: Sequence[Drafter] = ()
    ) -> None:
        self._native = native
        self._drafters, self._occasional = tuple(drafters), tuple(occasional)
        self._parts: tuple[TextLookup | Drafter, ...] = (
            *([] if native is None else [native]),
            *drafters,
            *occasional,
        )
        self.num_methods = len(self._parts) + (0 if native is None else native.num_methods - 1)

    @property
    def drafts_overlapped(self) -> bool:
        return all(each.drafts_overlapped for each in self._parts)

    def start(self, start: SequenceStart) -> None:
        for each in self._parts:
            each.start(start)

    def look_up(self, plan: DraftPlan) -> tuple[tuple[Draft, ...], ...]:
        found = [] if self._native is None else [*self._native.look_up(plan)]
        found += [drafter.propose(plan).drafts for drafter in self._drafters]
        for drafter in self._occasional:
            drafts = drafter.propose(plan).drafts
            if not found or any(map(_token_ids, drafts)):
                found.append(drafts)
        return tuple(found)

    def commit(self, continuations: Sequence[Continuation]) -> None:
        for each in self._parts:
            each.commit(continuations)

    def release(self, slot: int) -> None:
        for each in self._parts:
            each.release(slot)


class LookupDrafter:
    """A Drafter over a TextLookup with one method."""

    def __init__(self, lookup: TextLookup) -> None:
        assert lookup.num_methods == 1, lookup.num_methods
        self._lookup = lookup

    @property
    def drafts_overlapped(self) -> bool:
        return self._lookup.drafts_overlapped

    def start(self, start: SequenceStart) -> None:
        self._lookup.start(start)

    def propose(self, plan: DraftPlan, _until: Callable[[], bool] | None = None, /) -> Proposals:
        (drafts,) = self._lookup.look_up(plan)
        return Proposals(drafts=drafts)

    def commit(self, continuations: Sequence[Continuation]) -> None:
        self._lookup.commit(continuations)

    def release(self, slot: int) -> None:
        self._lookup.release(slot)
