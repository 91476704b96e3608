"""API keys: which routes require one, which keys are accepted, and which one a request presented."""

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from faser.api.protocol.errors import HttpError, error_response

# Orchestrators call these without a key.
_OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
_METRICS_PATH = "/metrics"


def presented_key(scope: Scope) -> bytes | None:
    """The API key that let this request in; None: its route or the server requires none. Never log it."""
    key: bytes | None = scope.get("state", {}).get("api_key")
    return key


class ApiKeyMiddleware:
    """ASGI middleware: every route requires one of the keys, except health checks and preflights.

    keys: empty: no route requires a key. open_metrics: /metrics requires none.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], open_metrics: bool) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._open = _OPEN_PATHS | {_METRICS_PATH} if open_metrics else _OPEN_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys and scope["type"] == "http" and not self._is_open(scope):
            key, refusal = self._accepted(Headers(scope=scope).get("authorization"))
            if key is None:
                error = HttpError(401, refusal, headers={"WWW-Authenticate": "Bearer"})
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["api_key"] = key
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return scope["method"] == "OPTIONS" or path in self._open

    def _accepted(self, header: str | None) -> tuple[bytes | None, str]:
        """(the key in the Authorization header; None: it is refused, for this reason, which never repeats it)."""
        if header is None:
            return None, "no API key; send the header Authorization: Bearer <key>"
        scheme, _, given = header.partition(" ")
        if scheme.lower() != "bearer":
            return None, "the Authorization header does not begin with Bearer; send Authorization: Bearer <key>"
        presented = given.strip().encode("latin-1")  # the bytes as received
        # Compare with every key, in constant time: timing must not reveal which key matched, or how much of it.
        matches = [key for key in self._keys if hmac.compare_digest(key, presented)]
        return (matches[0], "") if matches else (None, "the API key is not one of this server's")
