"""QueueSpeed: how fast samples end, and from this how long a refused client should wait."""

from collections import deque
from typing import NamedTuple

_WINDOW_S = 30.0
_MARK_EVERY_S = 1.0
_LEAST_MARKS = 8  # also where samples take so long that few end within the window


class QueueSpeed:
    """Samples that ended within the last half minute of work, or longer where few end. Idle time does not count.

    All times are in seconds of one clock, which the caller reads.
    """

    def __init__(self) -> None:
        self._now = _Mark(0.0, 0)
        self._marks = deque([self._now])  # where the window may begin: at least _MARK_EVERY_S apart

    def pass_time(self, busy_s: float) -> None:
        """Time went by in which there were unfinished samples."""
        self._now = _Mark(self._now.busy_s + busy_s, self._now.num_ended)

    def end(self, num_samples: int) -> None:
        """Unfinished samples have ended, for whatever reason."""
        self._now = now = _Mark(self._now.busy_s, self._now.num_ended + num_samples)
        if now.busy_s - self._marks[-1].busy_s >= _MARK_EVERY_S:
            self._marks.append(now)
        while len(self._marks) > _LEAST_MARKS and self._marks[1].busy_s <= now.busy_s - _WINDOW_S:
            self._marks.popleft()

    def wait_s(self, num_samples: int) -> float:
        """Seconds until num_samples more will have ended. Before one has: each takes as long as all so far."""
        begin, now = self._marks[0], self._now
        return num_samples * (now.busy_s - begin.busy_s) / max(now.num_ended - begin.num_ended, 1)


class _Mark(NamedTuple):
    """How long there had been work at some moment, and how many samples had ended."""

    busy_s: float
    num_ended: int
