"""TokenBucket: a rate limit that allows a minute's worth at once. Knows no clock: callers say what time it is.

Source: the token bucket of RFC 2697, with one colour. Its level may fall below zero, because what a request will
use is known only when it has been used: then the next one waits until the debt is paid.
"""

_MINUTE_S = 60.0


class TokenBucket:
    """Full at first. per_minute: how much flows in within a minute, and how much it holds."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._capacity = float(per_minute)
        self._level = self._capacity
        self._noted_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Seconds until it holds at least one; 0: it does now."""
        self._fill(now_s)
        return max(0.0, (1.0 - self._level) * _MINUTE_S / self._capacity)

    def take(self, amount: int, now_s: float) -> None:
        self._fill(now_s)
        self._level -= amount

    def _fill(self, now_s: float) -> None:
        flowed = (now_s - self._noted_s) * self._capacity / _MINUTE_S
        self._level = min(self._capacity, self._level + flowed)
        self._noted_s = now_s
