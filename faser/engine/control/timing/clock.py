"""The Clock seam: what time it is, in seconds. The control plane asks no other clock.

A simulated clock lets the same scheduler run in a simulator, where time passes only when it is told to.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since some fixed moment; never goes back."""

    def now(self) -> float: ...


class WallClock:
    """time.monotonic(), the clock of Request.arrival_s."""

    def now(self) -> float:
        return time.monotonic()


class SimulatedClock:
    """Stands still until advanced. start_s: the first answer of now()."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, f"a clock cannot go back {-seconds} s"
        self._now_s += seconds
