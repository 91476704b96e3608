"""The Drafter seam: who proposes the next tokens of sequences, and is told how they went on.

A drafter lives in the data plane and is the only owner of what it remembers of a slot. What it proposes is a
function of the tokens that the sequence has, never of its neighbours, so that a draft taken greedily is a point
mass and may be cut anywhere. It never sees the target's verdicts on its tokens beyond the tokens themselves.

While the target verifies one draft the next can be made: it continues DraftWish.unverified as if it were known.

    position     0 ...... n - 1 | n ... n + c - 1 | n + c ............
    a step       known          | behind: verified | drafted meanwhile
    the next     known, as far as behind was accepted, and the target's own token: the first of the draft, or not
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from faser.engine.contract.plan import Draft, DraftPlan, SequenceStart

NO_TOP = -1  # in place of a token id: there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposals:
    """drafts: in the order of the plan's requests. passes, catchup_tokens: as in Drafts.

    probs: [T, V] float64 on the target's device, the distribution each of the T drafted tokens was sampled from,
    draft after draft; None where drafts are point masses.
    top_ids: [T, M] int64 on the target's device, the likeliest tokens at each drafted token's place, in any order;
    a line of NO_TOP where the drafter of that token knows none. None: nobody asked for them.
    """

    drafts: tuple[Draft, ...]
    passes: int = 0
    catchup_tokens: int = 0
    probs: Tensor | None = None
    top_ids: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class Continuation:
    """token_ids: what the sequence in slot goes on with. num_accepted: so many leading ones it had drafted.

    Read only, and not frozen: see engine/contract/plan.py.
    """

    slot: int
    token_ids: tuple[int, ...]
    num_accepted: int = 0


class Drafter(Protocol):
    """One drafter for all slots. One call at a time; start, commit and release never while the target computes.

    Calls come in this order: start, then any number of propose and commit, then release.
    """

    @property
    def drafts_overlapped(self) -> bool:
        """Whether it can continue tokens that are being verified, in a thread of its own meanwhile.

        Not where it computes with the target's cache, nor where a draft is no point mass: the first token of such
        a draft could not be accepted by being the target's own.
        """
        ...

    def start(self, start: SequenceStart) -> None:
        """A sequence takes over a free slot with the tokens it has; its prompt is computed in later steps."""
        ...

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        """Drafts for every request. Their blocks are in the block table. Changes no sequence's tokens.

        A request with tokens behind gets the draft that it would get if they were known; only where drafts_overlapped.
        May then run beside the target's forward: of what is not the drafter's own it reads the block table alone.
        until: True once nobody waits for longer drafts. Asked between the passes of a drafter that needs them.
        """
        ...

    def commit(self, continuations: Sequence[Continuation]) -> None:
        """Sequences go on with these tokens, drafted or not. Called after every step that brought tokens.

        What was drafted behind tokens that came otherwise is void; what was drafted behind those that came may
        still come true, in this step and in the next ones.
        """
        ...

    def release(self, slot: int) -> None:
        """The slot is free. What the sequence said may be remembered, its slot not."""
        ...
