"""Frontiers: the overlapped draft of every sequence, and whether it still stands.

An overlapped draft is made while a step verifies an earlier draft, and continues that draft as if all of it were
accepted. Once the step's tokens are known the overlapped draft is judged at the border between the two: it stands
if everything before it was accepted and its first token is the one that the target sampled itself, the bonus
token. The rest of it is then the chunk that the next step verifies. OverlapControl decides which sequences draft.
"""

from collections.abc import Iterable
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from faser.engine.contract.plan import Draft


class Border(Enum):
    """What became of an overlapped draft.

    PASSED: its first token was right; the rest may be a chunk. REFUSED: its first token was wrong. UNJUDGED: a
    token before it was refused, or there was no draft.
    """

    PASSED = "passed"
    REFUSED = "refused"
    UNJUDGED = "unjudged"


class Frontiers:
    """By slot: whether it drafts overlapped, and the draft that passed the border, until it is taken."""

    def __init__(self, num_slots: int) -> None:
        self._standing: dict[int, Draft] = {}
        self._drafts: NDArray[np.bool_] = np.ones(num_slots, dtype=np.bool_)

    def start(self, slot: int) -> None:
        """A sequence takes over the slot, and may draft. What the slot's last sequence drafted is dropped."""
        self._drafts[slot] = True
        self._standing.pop(slot, None)

    def release(self, slot: int) -> None:
        """The sequence leaves its slot."""
        self._standing.pop(slot, None)

    def choose(self, slots: NDArray[np.int64], chosen: NDArray[np.int64]) -> None:
        """Of these slots those at the positions `chosen` draft overlapped."""
        self._drafts[slots] = False
        self._drafts[slots[chosen]] = True

    def drafts(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[S] whether each slot drafts overlapped."""
        return self._drafts[slots]

    def judge(self, unverified: tuple[int, ...], draft: Draft, token_ids: tuple[int, ...]) -> Border:
        """A step that verified `unverified` while `draft` was made brought token_ids.

        token_ids: the accepted ones and the bonus or recovered token; empty if the step brought nothing.
        """
        if not draft.token_ids or not token_ids or token_ids[:-1] != unverified:
            return Border.UNJUDGED
        if token_ids[-1] != draft.token_ids[0]:
            return Border.REFUSED
        self._standing[draft.slot] = draft
        return Border.PASSED

    def standing(self, slots: Iterable[int]) -> list[Draft | None]:
        """The draft of each slot that passed the border, its first token included; None: there is none."""
        return [self._standing.get(slot) for slot in slots]

    def clear(self) -> None:
        """The chunks were taken, or are not wanted any more."""
        self._standing.clear()
