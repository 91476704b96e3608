"""The outermost middleware: ids of requests, exceptions that no handler caught, and bodies that are never read.

A request's id comes from the X-Request-Id header, or is generated; a route may replace it with the id in the body.
Every answer repeats it in a header. A request that is answered before its body has been read ends its connection:
so a refusal (401, 404, 413, 415) costs the server no more of the body than it has read by then.
"""

import asyncio
import logging
import uuid
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from faser.api.bodies.bounds import MAX_ID_LENGTH
from faser.api.bodies.errors import ErrorResponse, HttpError, internal_error
from faser.errors import RequestError
from faser.logs import begin, bind

_log = logging.getLogger("faser.api")

REQUEST_ID_HEADER = "X-Request-Id"

# What is still read and thrown away after such an answer. A connection closed at once may take the answer along.
_DISCARD_S = 2.0
_DISCARD_BYTES = 8 << 20


def get_request_id(scope: Scope) -> str:
    request_id: str = scope["state"]["request_id"]
    return request_id


def set_request_id(scope: Scope, request_id: str, param: str) -> None:
    """Replace the id. Raises RequestError for an id that is not fit for a header or is too long for a log."""
    printable = request_id.isascii() and request_id.isprintable() and request_id.strip() == request_id
    if not printable or not 1 <= len(request_id) <= MAX_ID_LENGTH:
        raise RequestError(
            f"{param} is {request_id[:80]!r}; it must be 1 to {MAX_ID_LENGTH} printable ASCII characters",
            param=param,
        )
    scope["state"]["request_id"] = request_id
    bind(request_id=request_id)


class RequestIdMiddleware:
    """ASGI middleware around every one that may fail."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = get_request_id(scope)
            await send(message)

        scope.setdefault("state", {})["request_id"] = made = uuid.uuid4().hex
        begin(request_id=made)
        try:
            if given := Headers(scope=scope).get(REQUEST_ID_HEADER):
                set_request_id(scope, given, REQUEST_ID_HEADER)
            await self._app(scope, receive, send_with_id)
        except RequestError as error:
            await ErrorResponse(HttpError(400, str(error), param=error.param))(scope, receive, send_with_id)
        except Exception:
            request_id = get_request_id(scope)
            _log.exception("request %s failed", request_id)
            if started:
                raise  # closes the connection: the client must not take half an answer for a whole one
            await ErrorResponse(internal_error(request_id))(scope, receive, send_with_id)


class UnreadBodyMiddleware:
    """The outermost ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _has_body(Headers(scope=scope)):
            body = _Body(receive, waits_for_100=Headers(scope=scope).get("expect", "").lower() == "100-continue")
            await self._app(scope, body.receive, _ClosingSend(send, body))
        else:
            await self._app(scope, receive, send)


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


class _Body:
    """The body of one request, and whether it has been read to its end."""

    def __init__(self, receive: Receive, *, waits_for_100: bool) -> None:
        """waits_for_100: the client sends nothing before the body is asked for."""
        self._receive = receive
        self._is_coming = not waits_for_100
        self.unread = True

    async def receive(self) -> Message:
        self._is_coming = True
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self.unread = False
        return message

    async def discard(self) -> None:
        """Read on for a while, keeping nothing."""
        num_bytes = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_S):
                while self._is_coming and self.unread and num_bytes < _DISCARD_BYTES:
                    num_bytes += len((await self.receive()).get("body", b""))


class _ClosingSend:
    """Sends an answer. If the body is unread when it starts, the connection closes after it."""

    def __init__(self, send: Send, body: _Body) -> None:
        self._send = send
        self._body = body
        self._closes = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and self._body.unread:
            self._closes = True
            MutableHeaders(scope=message)["Connection"] = "close"
        ends = message["type"] == "http.response.body" and not message.get("more_body", False)
        if not (ends and self._closes):
            await self._send(message)
            return
        await self._send({**message, "more_body": True})  # the last message closes the connection
        await self._body.discard()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
