"""Affinity: which of several engines has seen the beginning of a prompt, and when that is worth a longer queue.

What an engine has seen is what was sent to it, not what its cache still holds: the caches need not be asked. A
prompt comes in pieces, of tokens or of bytes. Knows no engine and no request.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import TypeVar

_MOST_PIECES = 1 << 16  # that are remembered of each engine
_SLACK = 4  # samples that an engine may have more than the least busy one, for the sake of a prefix
_SLACK_SHARE = 0.25  # of the least busy one's samples, in addition

T = TypeVar("T")


def chained(namespace: bytes, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """A digest for each piece: of it and all before it, and of the cache's namespace. 16 bytes each."""
    digest = namespace
    for piece in pieces:
        digest = blake2b(digest + piece, digest_size=16).digest()
        yield digest


class Seen:
    """The digests of the pieces that one engine was sent, least recently used first."""

    def __init__(self) -> None:
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def known(self, digests: Sequence[bytes]) -> int:
        """How many pieces at the beginning of a prompt the engine has seen."""
        return next((at for at, digest in enumerate(digests) if digest not in self._digests), len(digests))

    def note(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > _MOST_PIECES:
            self._digests.popitem(last=False)


def best_first(engines: Iterable[T], known: Callable[[T], int], num_samples: Callable[[T], int]) -> list[T]:
    """The engine that has seen most of a prompt, unless it has clearly more to do than another; then by work.

    known: of Seen. num_samples: that an engine has now.
    """
    by_work = sorted(engines, key=num_samples)
    if len(by_work) < 2:
        return by_work
    best = max(by_work, key=known)
    least = num_samples(by_work[0])
    if known(best) and num_samples(best) <= least + _SLACK + _SLACK_SHARE * least:
        by_work.remove(best)
        by_work.insert(0, best)
    return by_work
