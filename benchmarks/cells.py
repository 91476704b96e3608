"""Cells, and how the runs of their arms become figures. Pure functions of plain values.

A cell is one setting, such as four requests at temperature 0. In it every arm has one run a round. Machines are
faster in one minute than in the next, so a figure is compared only with those of the same round: ratios and
differences come with an interval over the rounds (faser/cli/bench/estimates.py).
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from faser.cli.bench.estimates import Estimate, ratio

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell(Generic[T]):
    """labels: the setting. runs: by arm, a value for each round so far."""

    labels: Mapping[str, Any]
    runs: Mapping[str, list[T]]

    def values(self, arm: str, of: Callable[[T], float]) -> list[float]:
        return [of(run) for run in self.runs[arm]]

    def median(self, arm: str, of: Callable[[T], float]) -> float:
        return statistics.median(self.values(arm, of))

    def ratio(self, arm: str, base: str, of: Callable[[T], float]) -> "Estimate":
        return ratio(self.values(arm, of), self.values(base, of))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median, least and greatest of one number over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        ordered = sorted(values)
        return cls(median=statistics.median(ordered), low=ordered[0], high=ordered[-1])

    def text(self, digits: int = 2, unit: str = "") -> str:
        """Such as `1.52x (1.30 … 1.67)`."""
        return f"{self.median:.{digits}f}{unit} ({self.low:.{digits}f} … {self.high:.{digits}f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """One kind of time over all requests, in milliseconds."""

    mean_ms: float
    p50_ms: float
    p99_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Times":
        """Zeros where there is none."""
        if not len(seconds):
            return cls(mean_ms=0.0, p50_ms=0.0, p99_ms=0.0)
        p50, p99 = np.percentile(seconds, [50, 99])
        return cls(mean_ms=1000 * float(np.mean(seconds)), p50_ms=1000 * float(p50), p99_ms=1000 * float(p99))


def share(part: float, whole: float) -> float:
    """part / whole; 0 of nothing."""
    return part / whole if whole else 0.0


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, without a line break at its end."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows))
