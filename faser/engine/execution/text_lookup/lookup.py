"""The TextLookup seam: drafts copied from text, by several methods at once, for whoever chooses among them.

Owns the way from a lookup to a Drafter and back. What it costs decides about speculation with small models, so
one call asks all methods for all requests.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from faser.engine.contract.plan import Draft, DraftPlan, SequenceStart
from faser.engine.execution.drafters.drafter import Continuation, Drafter, Proposals

CORPUS_TOKENS = 262_144  # of past outputs that suffix drafts are copied from


class TextLookup(Protocol):
    """All methods of drafting from text. Calls, and their order, are those of a Drafter."""

    @property
    def num_methods(self) -> int: ...

    @property
    def drafts_overlapped(self) -> bool:
        """As a Drafter's, of all methods."""
        ...

    def start(self, start: SequenceStart) -> None: ...

    def guesses(self, plan: DraftPlan) -> tuple[tuple[Draft, ...], ...]:
        """A draft for every request, in their order, by each method. As Drafter.propose in everything else."""
        ...

    def commit(self, continuations: Sequence[Continuation]) -> None: ...

    def release(self, slot: int) -> None: ...


class SeparateLookups:
    """A TextLookup over a Drafter for each method."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)
        self.num_methods = len(self._drafters)

    @property
    def drafts_overlapped(self) -> bool:
        return all(drafter.drafts_overlapped for drafter in self._drafters)

    def start(self, start: SequenceStart) -> None:
        for drafter in self._drafters:
            drafter.start(start)

    def guesses(self, plan: DraftPlan) -> tuple[tuple[Draft, ...], ...]:
        return tuple(drafter.propose(plan).drafts for drafter in self._drafters)

    def commit(self, continuations: Sequence[Continuation]) -> None:
        for drafter in self._drafters:
            drafter.commit(continuations)

    def release(self, slot: int) -> None:
        for drafter in self._drafters:
            drafter.release(slot)


class LookupDrafter:
    """A Drafter over a TextLookup of one method."""

    def __init__(self, lookup: TextLookup) -> None:
        assert lookup.num_methods == 1, lookup.num_methods
        self._lookup = lookup

    @property
    def drafts_overlapped(self) -> bool:
        return self._lookup.drafts_overlapped

    def start(self, start: SequenceStart) -> None:
        self._lookup.start(start)

    def propose(self, plan: DraftPlan, _until: Callable[[], bool] | None = None, /) -> Proposals:
        (drafts,) = self._lookup.guesses(plan)
        return Proposals(drafts=drafts)

    def commit(self, continuations: Sequence[Continuation]) -> None:
        self._lookup.commit(continuations)

    def release(self, slot: int) -> None:
        self._lookup.release(slot)
