"""Comparisons of two ways to run that took turns: a mean ratio or difference with a 95 % interval.

Machines are faster in one minute than in the next, so a value is compared only with that of the same round.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from faser.optional import maybe

# Student's t, 97.5 %, by degrees of freedom from 1 on. Beyond the table it sinks to 1.960: taking the last value
# instead widens an interval by 4 % at most.
_T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Comparison of one arm with another over the same rounds. low, high: 95 % interval; None of one round."""

    mean: float
    low: float | None
    high: float | None
    rounds: int

    def rounded(self, digits: int = 4) -> dict[str, float | None]:
        return {name: maybe(lambda each: round(each, digits), value) for name, value in asdict(self).items()}

    def text(self, digits: int = 2, unit: str = "") -> str:
        """Such as `1.52x (1.30 … 1.67)`."""
        mean = f"{self.mean:.{digits}f}{unit}"
        return mean if self.low is None else f"{mean} ({self.low:.{digits}f} … {self.high:.{digits}f})"


def ratio(mine: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Geometric mean of mine over theirs, round by round; its interval is Student's of the logarithms.

    Raises ValueError unless there are as many of either, at least one, and all are above 0.
    """
    logs = _estimate([math.log(above / below) for above, below in zip(mine, theirs, strict=True)])
    low, high = maybe(math.exp, logs.low), maybe(math.exp, logs.high)
    return Estimate(mean=math.exp(logs.mean), low=low, high=high, rounds=logs.rounds)


def difference(mine: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Mean of mine minus theirs, round by round, with Student's interval. Raises ValueError as ratio does."""
    return _estimate([one - other for one, other in zip(mine, theirs, strict=True)])


def _estimate(values: Sequence[float]) -> Estimate:
    if not values:
        raise ValueError("there is no round to compare")
    mean, rounds = statistics.fmean(values), len(values)
    if rounds == 1:
        return Estimate(mean=mean, low=None, high=None, rounds=rounds)
    margin = t_975(rounds - 1) * statistics.stdev(values) / math.sqrt(rounds)
    return Estimate(mean=mean, low=mean - margin, high=mean + margin, rounds=rounds)


def t_975(freedom: int) -> float:
    """Student's t that 97.5 % stay below. freedom: degrees of it, at least 1; above 30 as at 30."""
    return _T_975[min(freedom, len(_T_975)) - 1]
