"""The Drafter protocol: it proposes the next tokens of sequences and learns how the sequences continue.

A drafter belongs to the data plane and is the only owner of what it remembers of a slot. A proposal depends on
the tokens of its sequence alone, never on other sequences in the batch, so a greedy draft is a point mass and may
be cut anywhere. Of acceptance results a drafter sees only the committed tokens.

While the target verifies a draft, the next one can be made: it continues DraftRequest.unverified as if known.

    position      0 ...... n - 1 | n ... n + c - 1            | n + c ............
    this step     known          | unverified: being verified | drafted meanwhile
    the next one  known: the accepted ones of the unverified tokens, then a bonus or recovered token, which may or
                  may not be the first token of the new draft
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from faser.engine.contract.plan import Draft, DraftPlan, SequenceStart


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
