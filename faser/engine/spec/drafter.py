"""The Drafter seam: who proposes the next tokens of sequences, and is told how they went on.

A drafter lives in the data plane and is the only owner of what it remembers of a slot. What it proposes is a
function of the tokens that the sequence has, never of its neighbours, so that a draft taken greedily is a point
mass and may be cut anywhere. It never sees the target's verdicts on its tokens beyond the tokens themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from faser.engine.plan import Draft, DraftPlan, SequenceStart


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposals:
    """drafts: in the order of the plan's wishes. passes, catchup_tokens: as in Drafts.

    probs: [T, V] float64 on the target's device, the distribution each of the T drafted tokens was sampled from,
    draft after draft; None where drafts are point masses.
    """

    drafts: tuple[Draft, ...]
    passes: int = 0
    catchup_tokens: int = 0
    probs: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """token_ids: what the sequence in slot goes on with. num_accepted: so many leading ones it had drafted."""

    slot: int
    token_ids: tuple[int, ...]
    num_accepted: int = 0


class Drafter(Protocol):
    """One drafter for all slots. Used from the engine's thread alone.

    Calls come in this order: start, then any number of (propose, commit), then release.
    """

    def start(self, start: SequenceStart) -> None:
        """A sequence takes over a free slot with the tokens it has; its prompt is computed in later steps."""
        ...

    def propose(self, plan: DraftPlan) -> Proposals:
        """Drafts for every wish. Their blocks are in the block table. Changes no sequence's tokens."""
        ...

    def commit(self, continuations: Sequence[Continuation]) -> None:
        """Sequences go on with these tokens, drafted or not. Called after every step that brought tokens."""
        ...

    def release(self, slot: int) -> None:
        """The slot is free. What the sequence said may be remembered, its slot not."""
        ...
