"""QueueSpeed: how fast samples end, and from this how long a refused client should wait."""

import math

_MEMORY_S = 30.0  # how far the past counts; as long as many short answers, or a few long ones


class QueueSpeed:
    """Samples that ended and seconds in which there were samples, both forgotten exponentially.

    Idle time does not count, and samples that end together count as many.
    All times are in seconds of one clock, which the caller reads.
    """

    def __init__(self) -> None:
        self._ended = 0.0
        self._busy_s = 0.0

    def pass_time(self, busy_s: float) -> None:
        """Time went by in which there were unfinished samples."""
        kept = math.exp(-busy_s / _MEMORY_S)
        self._ended *= kept
        self._busy_s = self._busy_s * kept + _MEMORY_S * (1.0 - kept)

    def end(self, num_samples: int) -> None:
        """Unfinished samples have ended, for whatever reason."""
        self._ended += num_samples

    def wait_s(self, num_samples: int) -> float:
        """Seconds until so many more samples will have ended. Before one has: each takes as long as all so far."""
        return num_samples * self._busy_s / max(self._ended, 1.0)
