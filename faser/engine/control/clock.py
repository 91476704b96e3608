"""The Clock seam: the time in seconds. The control plane reads no other clock.

With a simulated clock the same scheduler runs in a simulator, which advances the time itself.
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
    """Stands still until advanced. start_s: the time at the start."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, f"a clock cannot go back {-seconds} s"
        self._now_s += seconds
