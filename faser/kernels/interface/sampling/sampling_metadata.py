"""How the tokens of some rows are sampled: temperature, truncation, seed and position of each row.

On the host the numbers are arrays (SamplingMetadata); on a device they are tensors (DeviceSamplingMetadata).
Temperature 0 takes the most likely token. Above 0, tokens are ordered by likelihood (among equals the lower id
comes first), and each truncation works on the tokens that the one before it has kept:

    min_p   keeps the tokens that are at least min_p times as likely as the most likely one    0 is off
    top_k   keeps the first top_k tokens                                                       0 is off
    top_p   keeps the fewest first tokens that have top_p of the remaining probability         1 is off
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMetadata:
    """Of N rows, [N] each. temperature: float32. min_p, top_p: float64. top_k: int64.

    seeds: uint64, of the rows' requests. positions: int64, of the tokens that are sampled.
    """

    temperature: NDArray[np.float32]
    min_p: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    seeds: NDArray[np.uint64]
    positions: NDArray[np.int64]

    @classmethod
    def greedy(cls, positions: NDArray[np.int64]) -> "SamplingMetadata":
        """Rows that all take their most likely token. positions: [N], kept and not copied."""
        count = len(positions)
        return cls(
            temperature=np.zeros(count, dtype=np.float32),
            min_p=np.zeros(count),
            top_k=np.zeros(count, dtype=np.int64),
            top_p=np.ones(count),
            seeds=np.zeros(count, dtype=np.uint64),
            positions=positions,
        )

    def __len__(self) -> int:
        return len(self.positions)

    def among(self, rows: NDArray[np.int64]) -> "SamplingMetadata":
        """The metadata of these rows only."""
        return SamplingMetadata(
            temperature=self.temperature[rows],
            min_p=self.min_p[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            seeds=self.seeds[rows],
            positions=self.positions[rows],
        )

    def at(self, positions: NDArray[np.int64]) -> "SamplingMetadata":
        """The same requests at other positions, [N]."""
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
        """[N] whether the row's token is drawn at random."""
        random: NDArray[np.bool_] = self.temperature > 0
        return random

    @property
    def truncation_flags(self) -> "TruncationFlags":
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
    """What at least one row of a batch asks for; kernels skip what no row asks for. Hashable."""

    random: bool
    top_k: bool
    top_p: bool


GREEDY = TruncationFlags(random=False, top_k=False, top_p=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSamplingMetadata:
    """SamplingMetadata of R rows as tensors [R] on the device of the logits.

    temperature: float32. log_min_p: float32, at most 0, the natural logarithm of min_p, computed in float64 and
    then rounded; -inf is off. top_k: int64. top_p: float64. seeds: int64, the bits of the requests' uint64 seeds.
    positions: int64.
    """

    temperature: Tensor
    log_min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    seeds: Tensor
    positions: Tensor
