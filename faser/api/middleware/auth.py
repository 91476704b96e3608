"""API keys: which routes require one, and who a request counts as."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from faser.api.middleware.api_keys import ApiKeys
from faser.api.protocol.errors import HttpError, error_response

# Orchestrators call these without a key.
_OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
_METRICS_PATH = "/metrics"
_KEY_INDEX = "api_key_index"


class ApiKeyMiddleware:
    """ASGI middleware: every route requires one of the keys, except probes, preflights and the page's files.

    Notes in scope["state"]["api_key_index"] which key was presented. keys: whether a key is required, and which.
    open_metrics: /metrics requires none. open_routes: nor do these.
    """

    def __init__(
        self, app: ASGIApp, *, keys: ApiKeys, open_metrics: bool, open_routes: frozenset[str] = frozenset()
    ) -> None:
        self._app = app
        self._keys = keys
        self._open = _OPEN_PATHS | open_routes | ({_METRICS_PATH} if open_metrics else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys.required and scope["type"] == "http" and not self._is_open(scope):
            try:
                index = self._key_index(Headers(scope=scope))
            except HttpError as error:
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})[_KEY_INDEX] = index
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return scope["method"] == "OPTIONS" or path in self._open

    def _key_index(self, headers: Headers) -> int:
        """Which key the request presents. Raises HttpError (401), which never repeats what was presented."""
        index = self._keys.index_of(_presented(headers).encode("latin-1"))  # the bytes as received
        if index is None:
            raise _refusal("the API key is not one of this server's")
        return index


def _presented(headers: Headers) -> str:
    """The key of the Authorization header, or else of Anthropic's x-api-key."""
    header = headers.get("authorization")
    if header is None:
        key = headers.get("x-api-key")
        if key is None:
            raise _refusal("no API key; send the header Authorization: Bearer <key>, or x-api-key: <key>")
        return key.strip()
    scheme, _, given = header.partition(" ")
    if scheme.lower() != "bearer":
        raise _refusal("the Authorization header does not begin with Bearer; send Authorization: Bearer <key>")
    return given.strip()


def get_key_index(scope: Scope) -> int | None:
    """The index of the key that the request presents; None: its route requires none."""
    index: int | None = scope.get("state", {}).get(_KEY_INDEX)
    return index


def tenant_of(scope: Scope, request_id: str) -> str:
    """Who the request counts as where the engine is shared: its API key, else its connection, else itself."""
    index = get_key_index(scope)
    if index is not None:
        return f"key {index}"
    client = scope.get("client")
    return f"request {request_id}" if client is None else f"connection {client[0]}:{client[1]}"


def _refusal(message: str) -> HttpError:
    return HttpError(401, message, headers={"WWW-Authenticate": "Bearer"})
