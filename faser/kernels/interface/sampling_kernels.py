"""The seam between those who choose tokens, sampler and drafters, and the arithmetic that does it from logits.

Logits are [R, V] float32, every row in line; rows are independent of each other, bit for bit. Every
implementation gives the same tokens and the same masses: engine/execution/sampling/distribution.py defines them.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Reals = NDArray[np.float64]
Words = NDArray[np.uint64]

NO_TOKEN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncationParams:
    """What is done to N rows before a token is drawn. All [N].

    temperature: float32 above 0. They apply in this order, each to what the last one left; tokens are ordered by
    likelihood, ties by id, the lower one first. min_p: keep what is at least min_p times as likely as the most
    likely token; 0 is off. top_k: keep the first top_k; 0 is off. top_p: keep the fewest first tokens that have
    top_p of the mass; 1 is off.
    """

    temperature: NDArray[np.float32]
    min_p: NDArray[np.float64]
    top_k: Ints
    top_p: NDArray[np.float64]

    def of(self, rows: Ints) -> "TruncationParams":
        """Of some of the rows."""
        return TruncationParams(
            temperature=self.temperature[rows],
            min_p=self.min_p[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
        )


def best_then_drawn(choice: "SamplingKernels", logits: Tensor, shaping: TruncationParams, uniforms: Reals) -> Ints:
    """`take`, for a choice on the host, where two questions cost no more than one."""
    token_ids = choice.best(logits)
    at = np.flatnonzero((shaping.temperature > 0) & (token_ids != NO_TOKEN))
    if len(at):
        token_ids[at] = choice.draw(logits, at, token_ids[at], shaping.of(at), uniforms[at])
    return token_ids


class SamplingKernels(Protocol):
    """rows: [N], distinct. best: [N], what `best` said of these rows, none of them NO_TOKEN."""

    def best(self, logits: Tensor) -> Ints:
        """[R] the most likely token, in a tie the lowest id; NO_TOKEN where a NaN is or no finite maximum."""
        ...

    def best_and_lead(self, logits: Tensor) -> tuple[Ints, Reals]:
        """[R] what `best` says, and [R] by how much its logit exceeds all others.

        0 in a tie and where there is no token, infinite where no other can be chosen; a float32 difference.
        """
        ...

    def take(self, logits: Tensor, shaping: TruncationParams, uniforms: Reals) -> Ints:
        """[R] a token of each row: what `best` says, or `draw` where it has a temperature above 0. May overwrite.

        NO_TOKEN as in `best`. shaping, uniforms: of all rows; without a temperature, only that is looked at.
        """
        ...

    def draw(self, logits: Tensor, rows: Ints, best: Ints, shaping: TruncationParams, uniforms: Reals) -> Ints:
        """[N] a token of each of these rows. uniforms: [N] in [0, 1). May overwrite the rows."""
        ...

    def nearest(
        self, logits: Tensor, rows: Ints, best: Ints, shaping: TruncationParams, uniforms: Reals, window: float
    ) -> tuple[Ints, Reals]:
        """[N] a guess at what `draw` takes of similar logits with these numbers, and [N] its lead. Writes nothing.

        The masses lie side by side along [0, 1], in the order of token ids: the guess has most mass within
        `window` of the number, in a tie it has the lowest id. With a window of 0 it is what `draw` takes; other
        windows are from 2**-20 to 1, so that rounding cannot leave one empty. Leads are differences to the best
        other token, logits and temperature in float32 as in the masses; negative behind it, infinite without one.
        """
        ...

    def masses(self, logits: Tensor, rows: Ints, best: Ints, shaping: TruncationParams) -> None:
        """Put into these rows what their tokens are drawn from: whole numbers, proportional to probabilities."""
        ...

    def philox(self, counters: Words, keys: Words) -> Words:
        """[4, N] random words of counters [4, N] and keys [2, N], all contiguous; `philox.py` defines them."""
        ...
