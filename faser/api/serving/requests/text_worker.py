"""TextWorker: where texts are rendered, tokenised and decoded, so that no text holds up other requests.

A short text is worked on at once, a longer one in a thread. Tokenising takes some 200 bytes of memory for each
character, so large texts share one thread: only one of them needs that much at a time, and what it needed goes
back to the system.
"""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from faser.machine import return_free_memory

_T = TypeVar("_T")

_INLINE_CHARS = 2048  # handing work to a thread takes longer than tokenising so little
LARGE_CHARS = 1 << 15  # more of them are a large text


class TextWorker:
    """Of one server. Call it from an event loop."""

    def __init__(self) -> None:
        self._one_by_one = ThreadPoolExecutor(max_workers=1, thread_name_prefix="faser-large-texts")

    async def run(self, num_chars: int, work: Callable[[], _T]) -> _T:
        """The result of work on texts of num_chars characters together. Raises what work raises."""
        if num_chars <= _INLINE_CHARS:
            return work()
        if num_chars <= LARGE_CHARS:
            return await asyncio.to_thread(work)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._one_by_one, partial(_work_and_return_memory, work))


def count_chars(values: Iterable[Any]) -> int:
    """Characters of all strings in JSON values, and one for each value. Stops counting where the text is large."""
    found = 0
    waiting = list(values)
    while waiting and found <= LARGE_CHARS:
        value = waiting.pop()
        found += 1
        if isinstance(value, str):
            found += len(value)
        elif isinstance(value, dict):
            waiting += value.keys()
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return found


def _work_and_return_memory(work: Callable[[], _T]) -> _T:
    try:
        return work()
    finally:
        return_free_memory()
