"""ApiKeys: the keys that requests may present. They can be replaced while the server runs."""

import hmac
from collections.abc import Iterable
from hashlib import sha256


class ApiKeys:
    """Every key has an index, which stays its own for the life of the process.

    A key that is removed and added again has its old index; no other key ever gets it. So what is kept by index,
    such as limits and caches, never passes from one key to another when keys are replaced.
    required: there was a key at first, so requests need one, even if all keys are removed later.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._indices: dict[bytes, int] = {}  # by digest, of all keys there have been
        self._accepted: list[tuple[bytes, int]] = []
        self.replace(keys)
        self.required = bool(self._accepted)

    def __len__(self) -> int:
        return len(self._accepted)

    def replace(self, keys: Iterable[str]) -> None:
        """From now on these keys are accepted, and no others."""
        digests = dict.fromkeys(_digest(key.encode()) for key in keys)
        self._accepted = [(each, self._indices.setdefault(each, len(self._indices))) for each in digests]

    def accepts(self, index: int) -> bool:
        """Whether the key with this index has not been removed."""
        return any(accepted == index for _, accepted in self._accepted)

    def index_of(self, presented: bytes) -> int | None:
        """The index of the key that was presented; None: it is not accepted.

        The time does not depend on which key matches or on how much of one: digests of equal length are compared
        in constant time, and all of them.
        """
        digest, found = _digest(presented), None
        for accepted, index in self._accepted:
            if hmac.compare_digest(accepted, digest):
                found = index
        return found


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()
