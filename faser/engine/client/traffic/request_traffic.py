"""RequestTraffic: gathers the answers to one request, and hands those that may be kept to who keeps them.

Decides what may be kept. Knows neither files nor training.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from faser.types import FinishReason, OutputDelta, Request

_ENDED = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedAnswer:
    """One sample. ended_at: in Unix seconds."""

    request: Request
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None
    ended_at: int

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.token_ids)


class AnswerTaker(Protocol):
    """Keeps finished answers. Its methods return at once."""

    def put(self, answer: FinishedAnswer) -> None: ...

    def withhold(self) -> None:
        """A sample has ended that must not be kept."""
        ...


class RequestTraffic:
    """The answers to one request, while they grow.

    Requests of clients that keep them apart, by a cache_salt or a key, are withheld, and so are those that say
    `store: false`.
    """

    def __init__(self, request: Request, takers: Sequence[AnswerTaker]) -> None:
        self._request = request
        self._takers = takers
        self._recordable = request.may_record and request.cache_salt is None
        self._token_ids: list[list[int]] = [[] for _ in range(request.sampling.n)]

    def add(self, delta: OutputDelta) -> None:
        """One step of one sample."""
        token_ids, reason = self._token_ids[delta.index], delta.finish_reason
        if self._recordable:
            token_ids += delta.token_ids
        if reason not in _ENDED:
            return
        if not self._recordable:
            for taker in self._takers:
                taker.withhold()
        elif token_ids:
            answer = FinishedAnswer(
                request=self._request,
                token_ids=tuple(token_ids),
                finish_reason=reason,
                stop_reason=delta.stop_reason,
                ended_at=int(time.time()),
            )
            for taker in self._takers:
                taker.put(answer)
