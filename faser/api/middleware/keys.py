"""API keys: which are accepted, which routes require one, who a request counts as, and whose caches it shares.

Only requests of one namespace share prompts' KV blocks and drafts from past answers. A namespace belongs to one
pair of API key and `cache_salt`. Its name is a keyed hash with a secret: neither key nor salt leaves the
front-end, and no client can find the name of another's namespace. The secret is this process's own, or lasts as
long as the KV that is kept on disk.
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from faser.api.bodies.errors import ErrorResponse, HttpError

# Orchestrators call these without a key.
OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
_METRICS_PATH = "/metrics"
_KEY_INDEX, _KEY_IDENTITY = "api_key_index", "api_key_identity"
SECRET_BYTES = 32


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
        """Return whether the key with this index is still valid, that is, has not been removed."""
        return any(accepted == index for _, accepted in self._accepted)

    def identity(self, index: int) -> bytes:
        """Return a hash of the key with this index, which is the same in every process."""
        return next(digest for digest, known in self._indices.items() if known == index)

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
    return hashlib.sha256(key).digest()


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
        self._open = OPEN_PATHS | open_routes | ({_METRICS_PATH} if open_metrics else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys.required and scope["type"] == "http" and not self._is_open(scope):
            try:
                index = self._key_index(Headers(scope=scope))
            except HttpError as error:
                await ErrorResponse(error)(scope, receive, send)
                return
            scope.setdefault("state", {}).update({_KEY_INDEX: index, _KEY_IDENTITY: self._keys.identity(index)})
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return scope["method"] == "OPTIONS" or path in self._open

    def _key_index(self, headers: Headers) -> int:
        """Return the index of the key in the request. Raises HttpError (401), which never repeats the key."""
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


def _refusal(message: str) -> HttpError:
    return HttpError(401, message, headers={"WWW-Authenticate": "Bearer"})


def get_key_index(scope: Scope) -> int | None:
    """The index of the key that the request presents; None: its route requires none."""
    index: int | None = scope.get("state", {}).get(_KEY_INDEX)
    return index


def get_key_identity(scope: Scope) -> bytes | None:
    """Return a hash of the request's API key, the same in every process; None: there are no keys."""
    identity: bytes | None = scope.get("state", {}).get(_KEY_IDENTITY)
    return identity


def tenant_of(scope: Scope, request_id: str) -> str:
    """Return the tenant that a request counts for: its API key, else its connection, else the request itself."""
    index = get_key_index(scope)
    if index is not None:
        return f"key {index}"
    client = scope.get("client")
    return f"request {request_id}" if client is None else f"connection {client[0]}:{client[1]}"


class CacheNamespaces:
    """The namespaces of one server. across_keys: the API key makes no difference. secret: None: a new one."""

    def __init__(self, *, across_keys: bool, secret: bytes | None = None) -> None:
        self._across_keys = across_keys
        self._secret = secrets.token_bytes(SECRET_BYTES) if secret is None else secret

    def name(self, key: bytes | None, salt: str | None) -> str | None:
        """The namespace of a request; None: the one of all clients, which nothing keeps apart.

        key: identity of the API key that the request presented; None: the server has none. salt: `cache_salt`.
        """
        if self._across_keys:
            key = None
        if key is None and salt is None:
            return None
        pair = repr((key, salt)).encode()  # repr: no two pairs look alike, and a lone surrogate is escaped
        return hashlib.blake2b(pair, key=self._secret, digest_size=SECRET_BYTES).hexdigest()
