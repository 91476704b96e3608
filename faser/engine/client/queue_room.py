"""QueueRoom: how many samples may be in flight, and that no tenant takes all the room there is.

Beside its own samples a tenant leaves an eighth as much free, so that another one finds room at any time: alone it
holds eight ninths at most, and of two that send without end each comes to eight seventeenths. Nothing that was
accepted is dropped for it.

Source: the dynamic thresholds of Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet
switches", IEEE/ACM Transactions on Networking 6(2), 1998, with alpha = 8. Beyond the paper: samples that do not
have to wait are always accepted, and eight of a tenant's leave nothing free, for small queues.
"""

from collections import Counter

NO_TENANT = ""  # of an engine with one user, which may fill all the room

_SHARE_LEFT_FREE = 8  # one sample for every eight of a tenant's own


class QueueRoom:
    """Counts the samples in flight, by tenant. num_slots: how many of them run; num_waiting: how many may wait."""

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
        """How many samples, of whichever tenant, must end before it may have num_samples more. 0: it may now."""
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
        """Why a tenant may not have num_samples more now, with the numbers."""
        text = (
            f"{self._num_samples} samples are in flight and {num_samples} more were asked for; "
            f"the limit is {self._limit}"
        )
        if self._num_samples + num_samples <= self._limit:
            text += f", and a client that holds {self._held[tenant]} of them leaves an eighth as much free"
        return text
