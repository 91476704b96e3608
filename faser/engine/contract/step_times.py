"""What steps take on this machine, as measured before the first request: a message from execution to control.

Plain values. The cost model in the control plane follows them online; nothing here changes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from faser.errors import ConfigError

Floats = NDArray[np.float64]


class Role(StrEnum):
    """step: target forward, logits, choice of tokens. pass: one of a draft model. text: one look-up."""

    STEP = "step"
    PASS = "pass"
    TEXT = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Seconds by row count. rows ascend; between two of them time is linear, above the last it goes on rising.

    seconds: without what reading the KV cache costs: kv_token_s more for every token in it that is read.
    Raises ConfigError for anything else.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    kv_token_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.seconds):
            raise ConfigError(f"a cost table has {len(self.rows)} row counts and {len(self.seconds)} times")
        if self.rows[0] < 1 or any(a >= b for a, b in zip(self.rows, self.rows[1:], strict=False)):
            raise ConfigError(
                f"the row counts of a cost table are {list(self.rows)}; they must ascend from 1 or more"
            )
        if any(not 0 <= each < math.inf for each in (*self.seconds, self.kv_token_s)):
            raise ConfigError("a cost table has a time that is not a number of seconds from 0 on")
        if any(a > b for a, b in zip(self.seconds, self.seconds[1:], strict=False)):
            raise ConfigError("a cost table has a time that falls where rows rise")

    @classmethod
    def measured(cls, seconds: Mapping[int, float], *, kv_token_s: float = 0.0) -> "CostTable":
        """From medians by row count, made monotone by least squares: one slow one hides no slope."""
        rows = sorted(seconds)
        rising = np.maximum.accumulate(_isotonic([seconds[each] for each in rows]))  # of what rounding leaves
        return cls(rows=tuple(rows), seconds=tuple(float(each) for each in rising), kv_token_s=kv_token_s)

    def dense(self, num_rows: int) -> Floats:
        """[num_rows + 1] seconds for 0 … num_rows rows; no rows, no time.

        The slope above the largest measured count is the one from half of that count on: the last two may be
        neighbours, and then it would be noise.
        """
        wanted = np.arange(num_rows + 1)
        found = np.interp(wanted, self.rows, self.seconds)
        last = self.rows[-1]
        first = next(each for each in reversed(self.rows) if each <= last / 2 or each == self.rows[0])
        if last > first:
            rise = (self.seconds[-1] - self.seconds[self.rows.index(first)]) / (last - first)
            found[last + 1 :] += rise * (wanted[last + 1 :] - last)
        found[0] = 0.0
        return found


def _isotonic(values: Sequence[float]) -> list[float]:
    """The nearest sequence that nowhere falls: neighbours that do are replaced by their mean (pool adjacent)."""
    pools: list[tuple[float, int]] = []  # sum, count
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] * pools[-1][1] > pools[-1][0] * pools[-2][1]:
            (total, count), (before, counted) = pools.pop(), pools.pop()
            pools.append((before + total, counted + count))
    return [total / count for total, count in pools for _ in range(count)]
