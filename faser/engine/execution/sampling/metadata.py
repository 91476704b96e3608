"""How the tokens of some rows are to be chosen, as their requests asked. Knows no logits and no device."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMetadata:
    """Of N rows, in their order, [N] each.

    temperature: float32; 0 takes the most likely token. min_p: float64, 0 is off. top_k: int64, 0 is off. top_p:
    float64, 1 is off. seeds: uint64, of the rows' sequences. positions: int64, of the tokens that are chosen.
    """

    temperature: NDArray[np.float32]
    min_p: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    seeds: NDArray[np.uint64]
    positions: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.positions)

    def among(self, rows: NDArray[np.int64]) -> "SamplingMetadata":
        """Those of these rows."""
        return SamplingMetadata(
            temperature=self.temperature[rows],
            min_p=self.min_p[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            seeds=self.seeds[rows],
            positions=self.positions[rows],
        )

    def at(self, positions: NDArray[np.int64]) -> "SamplingMetadata":
        """The same, of tokens at these positions, [N]."""
        return SamplingMetadata(
            temperature=self.temperature,
            min_p=self.min_p,
            top_k=self.top_k,
            top_p=self.top_p,
            seeds=self.seeds,
            positions=positions,
        )

    @property
    def is_random(self) -> NDArray[np.bool_]:
        """[N] whose tokens are drawn."""
        random: NDArray[np.bool_] = self.temperature > 0
        return random

    @property
    def cuts(self) -> "TruncationFlags":
        random = self.is_random
        if not random.any():
            return GREEDY
        return TruncationFlags(
            random=True,
            top_k=bool((random & (self.top_k > 0)).any()),
            top_p=bool((random & (self.top_p < 1)).any()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncationFlags:
    """What some row of a choice asks for; what no row asks for need not be computed. Hashable."""

    random: bool
    top_k: bool
    top_p: bool


GREEDY = TruncationFlags(random=False, top_k=False, top_p=False)
