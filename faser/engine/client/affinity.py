"""Affinity: which of several engines has seen the beginning of a prompt, when that is worth a longer queue, and
how much of the prompt an engine's prefix cache will hold.

What an engine has seen is what was sent to it, not what its cache still holds: the caches need not be asked. A
prompt comes in pieces, of tokens or of bytes. How much is cached is an expectation, by what was cached of the
latest requests with the same first block. Knows no engine.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import TypeVar

from faser.types.request import Request

_MOST_PIECES = 1 << 16  # that are remembered of each engine
_SLACK = 4  # samples that an engine may have more than the least busy one, for the sake of a prefix
_SLACK_SHARE = 0.25  # of the least busy one's samples, in addition
_BLOCK = 16  # tokens that prompts have to share, so that they count as alike
_MOST_BLOCKS = 4096  # that are remembered; the least recently used one goes first
_FOLLOW = 0.5  # weight of the newest request

T = TypeVar("T")


def chained(salt: bytes, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """A digest for each piece: of it, all before it, and the salt. 16 bytes each."""
    digest = salt
    for piece in pieces:
        digest = blake2b(digest + piece, digest_size=16).digest()
        yield digest


class Seen:
    """The digests of the pieces that one engine was sent, least recently used first."""

    def __init__(self) -> None:
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def known(self, digests: Sequence[bytes]) -> int:
        """Return how many pieces at the beginning of a prompt the engine has seen."""
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


class PrefixReach:
    """Cached tokens of prompts, as a mean by first block that follows the newest ones."""

    def __init__(self) -> None:
        self._cached: OrderedDict[int, float] = OrderedDict()

    def uncached(self, request: Request) -> int:
        """Return how many tokens of the prompt will have to be computed: at least one."""
        return max(len(request.prompt_token_ids) - round(self._cached.get(_key(request), 0.0)), 1)

    def note(self, request: Request, num_cached: int) -> None:
        """Take in how many tokens of a prompt were cached when it began."""
        key = _key(request)
        known = self._cached.get(key)
        self._cached[key] = num_cached if known is None else known + _FOLLOW * (num_cached - known)
        self._cached.move_to_end(key)
        if len(self._cached) > _MOST_BLOCKS:
            self._cached.popitem(last=False)


def _key(request: Request) -> int:
    return hash((request.cache_salt, request.adapter, request.prompt_token_ids[:_BLOCK]))
