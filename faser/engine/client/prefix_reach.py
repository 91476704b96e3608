"""PrefixReach: how much of a prompt the engine's prefix cache will hold, judged by the prompt's first block.

Owns what requests with the same first block had cached lately. Asks no engine: what it says is an expectation.
"""

from collections import OrderedDict

from faser.types import Request

_BLOCK = 16  # tokens that prompts have to share, so that they count as alike
_MOST_BLOCKS = 4096  # that are remembered; the least recently used one goes first
_FOLLOW = 0.5  # weight of the newest request


class PrefixReach:
    """Cached tokens of prompts, as a mean by first block that follows the newest ones."""

    def __init__(self) -> None:
        self._cached: OrderedDict[int, float] = OrderedDict()

    def uncached(self, request: Request) -> int:
        """How many tokens of the prompt will have to be computed: one at least."""
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
    return hash((request.cache_salt, request.prompt_token_ids[:_BLOCK]))
