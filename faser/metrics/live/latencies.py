"""Latencies: percentiles of the last seconds, from counts in bins that are 4.4 % apart.

A value costs one logarithm, however many there are; a percentile is within 2.2 % of the exact one. The bins of the
Prometheus series are up to 2.5 times apart, too coarse for a chart of one server.
"""

import math
from collections import deque
from collections.abc import Sequence

_FIRST_S = 1e-4
_PER_DOUBLING = 16
_NUM_BINS = _PER_DOUBLING * 24  # the last one begins at 1,606 s
RESOLUTION = 2 ** (0.5 / _PER_DOUBLING) - 1


class Latencies:
    """Of one kind. window: percentiles are those of this many calls of `tick`, and of what came since the last."""

    def __init__(self, window: int) -> None:
        self._counts = [0] * _NUM_BINS
        self._before: deque[list[int]] = deque([[0] * _NUM_BINS], maxlen=window)

    def add(self, seconds: float) -> None:
        place = int(_PER_DOUBLING * math.log2(seconds / _FIRST_S)) if seconds > _FIRST_S else 0
        self._counts[place if place < _NUM_BINS else _NUM_BINS - 1] += 1

    def tick(self) -> None:
        """A part of the window has passed."""
        self._before.append(self._counts.copy())

    def percentiles(self, shares: Sequence[float]) -> tuple[int, list[float]]:
        """How many values the window has, and the smallest value, in seconds, that covers each share of them.

        shares: rising, above 0 to 1. Without values there is no percentile.
        """
        counts = [now - before for now, before in zip(self._counts, self._before[0], strict=True)]
        total = sum(counts)
        if not total:
            return 0, []
        found, covered, place = [], counts[0], 0
        for share in shares:
            while covered < math.ceil(share * total):
                place += 1
                covered += counts[place]
            found.append(_FIRST_S * 2 ** ((place + 0.5) / _PER_DOUBLING))
        return total, found
