"""The Verifier seam: what becomes of drafted tokens, given the target's logits of their rows.

Rows come sequence after sequence: the γ + 1 rows of a sequence judge its γ drafted tokens in order, and the row
behind the last accepted one yields the target's own token. See the implementations for the rules. Nobody writes to
the values; as in engine/contract/plan.py they are not frozen, since every step makes many.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from faser.types import PositionLogprobs


@dataclass(slots=True, kw_only=True)
class DraftedRows:
    """The rows of one sequence that are to be judged: len(draft) + 1 of them.

    position: of the token that the first row chooses. draft: drafted tokens at position, position + 1, …; may be
    empty.
    """

    slot: int
    position: int
    draft: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class AcceptanceResult:
    """token_ids: accepted drafts, then one of the target's own. num_accepted: len(token_ids) - 1.

    logprobs: one per token where the request asked. error: no token could be chosen at the first row that came
    to be judged; the accepted tokens before it are dropped with it.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] | None = None
    error: str | None = None


class Verifier(Protocol):
    """Judges the drafts of a whole step at once."""

    def judge(
        self, logits: Tensor, sequences: Sequence[DraftedRows], draft_probs: Tensor | None
    ) -> list[AcceptanceResult]:
        """One verdict per sequence. Leaves the sampler's state as it was; the caller accepts the tokens.

        logits: [R, V] float32, R = sum of len(draft) + 1; overwritten. draft_probs: [T, V] float64, the
        distribution each drafted token was sampled from, T = sum of len(draft); None for point masses.
        """
        ...
