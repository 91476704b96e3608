"""Limits of each API key: requests at once, requests per minute and tokens per minute. All are off by default.

A request that exceeds one gets a 429, before its body is read. Tokens are counted when they are used, so a key may
exceed its tokens once and then waits until the rate has made up for it.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from faser.api.bodies.errors import ErrorResponse, HttpError
from faser.api.http.paths import route_of
from faser.api.middleware.keys import get_key_index
from faser.memo import Memo

_MINUTE_S = 60.0
_USAGE = "key_usage"
_SMOOTHING = 0.2  # of the time that a request takes
Clock = Callable[[], float]


class TokenBucket:
    """A rate limit that allows a minute's worth at once. Knows no clock: callers say what time it is.

    Full at first. per_minute: how much flows in within a minute, and how much it holds. Its level may fall below
    zero, because what a request will use is known only when it has been used: then the next one waits until the
    debt is paid. Source: the token bucket of RFC 2697, with one colour.
    """

    def __init__(self, per_minute: float, now_s: float) -> None:
        self._capacity = per_minute
        self._level = self._capacity
        self._noted_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Seconds until it holds at least one; 0: it does now."""
        self._fill(now_s)
        return max(0.0, (1.0 - self._level) * _MINUTE_S / self._capacity)

    def take(self, amount: int, now_s: float) -> None:
        self._fill(now_s)
        self._level -= amount

    def _fill(self, now_s: float) -> None:
        flowed = (now_s - self._noted_s) * self._capacity / _MINUTE_S
        self._level = min(self._capacity, self._level + flowed)
        self._noted_s = now_s


class Unlimited:
    """A rate limit that allows everything."""

    def wait_s(self, _now_s: float) -> float:
        """Return how long to wait: not at all. See TokenBucket."""
        return 0.0

    def take(self, amount: int, now_s: float) -> None:
        """Take any amount. See TokenBucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """Limits of each API key."""

    parallel_requests: float = math.inf
    requests_per_minute: float = math.inf
    tokens_per_minute: float = math.inf

    @property
    def any(self) -> bool:
        return min(self.parallel_requests, self.requests_per_minute, self.tokens_per_minute) < math.inf


class KeyUsage:
    """Usage of one API key so far."""

    def __init__(self, limits: KeyLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._num_open = 0
        self._request_s = 0.0  # how long a request takes, smoothed
        self._requests = _bucket(limits.requests_per_minute, clock)
        self._tokens = _bucket(limits.tokens_per_minute, clock)

    def refusal(self) -> HttpError | None:
        """Return the error for a key that cannot have another request now; None: it can."""
        limits, now_s = self._limits, self._clock()
        if self._num_open >= limits.parallel_requests:
            return _refusal(
                f"this API key has {self._num_open} unfinished requests; at most {limits.parallel_requests} are "
                "allowed at once",
                self._request_s / limits.parallel_requests,
            )
        for bucket, limit, unit in (
            (self._requests, limits.requests_per_minute, "requests"),
            (self._tokens, limits.tokens_per_minute, "tokens"),
        ):
            if (wait_s := bucket.wait_s(now_s)) > 0:
                return _refusal(f"this API key has used its {limit} {unit} per minute", wait_s)
        return None

    def begin(self) -> float:
        """A request begins. Returns what `end` needs."""
        now_s = self._clock()
        self._num_open += 1
        self._requests.take(1, now_s)
        return now_s

    def end(self, began_s: float) -> None:
        self._num_open -= 1
        self._request_s += _SMOOTHING * (self._clock() - began_s - self._request_s)

    def use_tokens(self, num_tokens: int) -> None:
        self._tokens.take(num_tokens, self._clock())


def _bucket(per_minute: float, clock: Clock) -> TokenBucket | Unlimited:
    return Unlimited() if per_minute == math.inf else TokenBucket(per_minute, clock())


def _refusal(message: str, wait_s: float) -> HttpError:
    retry_after_s = max(1, math.ceil(wait_s))
    return HttpError(
        429, f"{message}; try again in {retry_after_s} s", headers={"Retry-After": str(retry_after_s)}
    )


class KeyLimitsMiddleware:
    """ASGI middleware inside the one that notes the key. on_refused: is called for each 429.

    free_routes: count for no limit. They generate nothing and have limits of their own.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: KeyLimits,
        on_refused: Callable[[], None],
        free_routes: frozenset[str] = frozenset(),
        clock: Clock = time.monotonic,
    ) -> None:
        self._app = app
        self._free_routes = free_routes
        self._on_refused = on_refused
        self._usage = Memo[int, KeyUsage](lambda _index: KeyUsage(limits, clock))  # by the key's index

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        index = get_key_index(scope)
        if index is None or route_of(scope["path"], scope.get("root_path", "")) in self._free_routes:
            await self._app(scope, receive, send)
            return
        usage = self._usage[index]
        if (refusal := usage.refusal()) is not None:
            self._on_refused()
            await ErrorResponse(refusal)(scope, receive, send)
            return
        began_s = usage.begin()
        scope["state"][_USAGE] = usage
        try:
            await self._app(scope, receive, send)
        finally:
            usage.end(began_s)


def use_tokens(scope: Scope, num_tokens: int) -> None:
    """Count tokens that a request uses, prompt or generated, for the key that it presents."""
    usage: KeyUsage | None = scope.get("state", {}).get(_USAGE)
    if usage is not None:
        usage.use_tokens(num_tokens)
