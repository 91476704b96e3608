"""The frontier of every sequence: what was drafted ahead of its last step, and what of it still stands.

A draft that was made beside a step continued that step's own draft, as if all of it would be accepted. Once the
step's tokens are known the draft is judged at the border: it stands if everything before it was accepted and its
first token is the one that the target chose itself. Then the rest is the chunk that the next step verifies. Plain
values, no torch; which mode and how long is overlap's business.
"""

from collections.abc import Iterable
from enum import Enum

from faser.engine.contract.plan import Draft


class Border(Enum):
    """What became of a draft made ahead. PASSED: its first token was right; the rest may be a chunk.
    REFUSED: it was wrong. UNJUDGED: the step's own draft was refused before, or there was no draft."""

    PASSED = "passed"
    REFUSED = "refused"
    UNJUDGED = "unjudged"


class Frontiers:
    """By slot. A slot has a chunk from the step that passed the border until it is taken, or dropped."""

    def __init__(self) -> None:
        self._standing: dict[int, Draft] = {}

    def judge(self, behind: tuple[int, ...], draft: Draft, token_ids: tuple[int, ...]) -> Border:
        """A step that verified `behind`, and beside which draft was made, brought token_ids.

        These are the accepted ones, and one of the target's own; none where it brought nothing.
        """
        if not draft.token_ids or not token_ids or token_ids[:-1] != behind:
            return Border.UNJUDGED
        if token_ids[-1] != draft.token_ids[0]:
            return Border.REFUSED
        self._standing[draft.slot] = draft
        return Border.PASSED

    def standing(self, slots: Iterable[int]) -> list[Draft | None]:
        """Drafts whose first token passed the border, so that the others are a chunk; None: not ready."""
        return [self._standing.get(slot) for slot in slots]

    def clear(self) -> None:
        """Chunks were taken, or nobody wants them any more."""
        self._standing.clear()

    def drop(self, slot: int) -> None:
        """The sequence leaves its slot."""
        self._standing.pop(slot, None)
