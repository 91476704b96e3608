"""The queue in numbers: its room (QueueRoom), its speed (QueueSpeed), and what it suffers (PreemptionLog)."""

import logging
from collections import Counter, deque
from typing import NamedTuple

from faser.config.declaration import show_bytes

NO_TENANT = ""  # of an engine with one user, which may fill all the room
_SHARE_LEFT_FREE = 8  # one sample for every eight of a tenant's own
_WINDOW_S = 30.0
_MARK_EVERY_S = 1.0
_LEAST_MARKS = 8  # also where samples take so long that few end within the window
_log = logging.getLogger("faser.engine")
_OFTEN = 20  # preemptions within _WINDOW_S: beyond what a short burst of long answers causes
_PREEMPTION_WINDOW_S = 60.0
_QUIET_S = 600.0


class QueueRoom:
    """Limit on samples in flight that keeps any tenant from taking all the room.

    num_slots: how many of them run; num_waiting: how many may wait. Next to its own samples a tenant leaves an
    eighth as much free, so that another one finds room at any time: alone it holds eight ninths at most, and of
    two that send without end each comes to eight seventeenths. Nothing that was accepted is dropped for it.

    Source: the dynamic thresholds of Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory
    packet switches", IEEE/ACM Transactions on Networking 6(2), 1998, with alpha = 8. Beyond the paper: samples
    that do not have to wait are always accepted, and eight of a tenant's leave nothing free, for small queues.
    """

    def __init__(self, *, num_slots: int, num_waiting: int) -> None:
        self._num_slots = num_slots
        self._limit = num_slots + num_waiting
        self._held: Counter[str] = Counter()
        self._num_samples = 0

    @property
    def num_samples(self) -> int:
        return self._num_samples

    @property
    def most_of_one(self) -> int:
        """The most samples that one of several tenants may have in flight, while the others have none."""
        return max(self._num_slots, self._limit - self._limit // (_SHARE_LEFT_FREE + 1))

    def most_of(self, tenant: str) -> int:
        return self._limit if tenant == NO_TENANT else self.most_of_one

    def missing(self, tenant: str, num_samples: int) -> int:
        """Return how many samples must end before the tenant may have num_samples more. 0: it may now."""
        together = self._num_samples + num_samples
        left_free = 0
        if tenant != NO_TENANT:
            left_free = (self._held[tenant] + num_samples - 1) // _SHARE_LEFT_FREE
        return max(0, min(together - self._num_slots, together + left_free - self._limit))

    def take(self, tenant: str, num_samples: int) -> None:
        self._held[tenant] += num_samples
        self._num_samples += num_samples

    def give_back(self, tenant: str, num_samples: int) -> None:
        self._held[tenant] -= num_samples
        self._num_samples -= num_samples
        if not self._held[tenant]:
            del self._held[tenant]

    def refusal(self, tenant: str, num_samples: int) -> str:
        """Return why a tenant may not have num_samples more now, with the numbers."""
        text = (
            f"{self._num_samples} samples are in flight and {num_samples} more were asked for; "
            f"the limit is {self._limit}"
        )
        if self._num_samples + num_samples <= self._limit:
            text += f", and a client that holds {self._held[tenant]} of them leaves an eighth as much free"
        return text


class QueueSpeed:
    """Rate at which samples end, and from this how long a refused client should wait.

    Samples that ended within the last half minute of work, or longer where few end. Idle time does not count.

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
    """Totals at some moment: seconds with work, and samples that had ended."""

    busy_s: float
    num_ended: int


class PreemptionLog:
    """Warns at _OFTEN preemptions within a minute, then not for ten minutes. Times are of time.monotonic()."""

    def __init__(self, *, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._began_s = 0.0
        self._before = 0  # preemptions when the window began
        self._last = 0
        self._quiet_until_s = 0.0

    def note(self, num_preemptions: int, now_s: float, kv_cache_bytes: int) -> None:
        """num_preemptions: since the engine started. A new engine begins at 0."""
        if num_preemptions == self._last:
            return
        if num_preemptions < self._last or now_s - self._began_s > _PREEMPTION_WINDOW_S:
            self._began_s = now_s
            self._before = min(num_preemptions, self._last)
        self._last = num_preemptions
        recent = num_preemptions - self._before
        if recent < _OFTEN or now_s < self._quiet_until_s:
            return
        self._quiet_until_s = now_s + _QUIET_S
        _log.warning(
            "the KV cache is too small for this load: %d sequences were preempted within a minute, and what they "
            "had computed is computed again; raise --kv-cache-memory, which is %s, or lower --max-num-seqs, which "
            "is %d",
            recent,
            show_bytes(kv_cache_bytes),
            self._max_num_seqs,
        )
