"""The Verifier contract: which draft tokens are accepted, given the target's logits of their rows.

Rows come sequence after sequence: the γ + 1 rows of a sequence judge its γ draft tokens in order, and the row
after the last accepted one yields the bonus token, or the recovered token after a rejection. See the
implementations for the rules. Values are not frozen, because every step makes many; after their creation they are
only read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from faser.types import PositionLogprobs, SequenceError


@dataclass(slots=True, kw_only=True)
class DraftedRows:
    """The len(draft) + 1 rows of one sequence.

    position: of the token that the first row samples. draft: draft tokens at position, position + 1, …; may be
    empty.
    """

    slot: int
    position: int
    draft: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class AcceptanceResult:
    """token_ids: the accepted draft tokens, then the bonus or recovered token; so len(token_ids) - 1 are accepted.

    logprobs: one per token where the request asks for them. error: why the last row that was reached has no token;
    then the accepted tokens before it are dropped too.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] | None = None
    error: SequenceError | None = None


class Verifier(Protocol):
    """Accepts or rejects the drafts of a whole step at once."""

    def judge(
        self, logits: Tensor, sequences: Sequence[DraftedRows], draft_probs: Tensor | None
    ) -> list[AcceptanceResult]:
        """One result per sequence. Leaves the sampler's state as it was; the caller accepts the tokens.

        logits: [R, V] float32, R = sum of len(draft) + 1; overwritten. draft_probs: [T, V] float64, the
        distribution each drafted token was sampled from, T = sum of len(draft); None for point masses.
        """
        ...
