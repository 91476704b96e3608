"""Requests whose answers have a structure are prepared in threads: their grammars are compiled off the step loop.

A request comes back as a message when it is ready, or with the reason why it never will be.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from faser.engine.contract.messages import Abort
from faser.errors import RequestError
from faser.types import Request

_NUM_THREADS = 2  # a grammar that takes long does not hold up all others


@dataclass(frozen=True, slots=True)
class Prepared:
    """error: why the request cannot be served; None: it can be added."""

    request: Request
    error: RequestError | None


class Preparation:
    """prepare: called in a thread; raises RequestError. put: takes the message, from that thread.

    Its other methods belong to one thread.
    """

    def __init__(self, prepare: Callable[[Request], None], put: Callable[[Prepared], None]) -> None:
        self._prepare = prepare
        self._put = put
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="faser-preparation")
        self._aborts: dict[str, list[Abort]] = {}  # of each request that is being prepared

    def begin(self, request: Request) -> None:
        self._aborts[request.request_id] = []
        self._pool.submit(self._run, request)

    def abort(self, message: Abort) -> bool:
        """Whether the request is being prepared; then the message is kept until its end."""
        kept = self._aborts.get(message.request_id)
        if kept is not None:
            kept.append(message)
        return kept is not None

    def end(self, request: Request) -> list[Abort]:
        """The request has been prepared. Returns what was aborted of it meanwhile."""
        return self._aborts.pop(request.request_id)

    def close(self) -> None:
        """End the threads; what is being prepared is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, request: Request) -> None:
        error = None
        try:
            self._prepare(request)
        except RequestError as found:
            error = found
        except Exception as found:  # a fault of ours; its request fails, and no other
            error = RequestError(f"the structured output cannot be prepared: {type(found).__name__}: {found}")
        self._put(Prepared(request, error))
