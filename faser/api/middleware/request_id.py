"""RequestIdMiddleware: gives every request an id, and turns unexpected exceptions into error answers.

The id comes from the X-Request-Id header, or is generated. A route may replace it with the id in the body.
Every answer repeats the id in a header.
"""

import logging
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from faser.api.protocol.errors import HttpError, error_response, internal_error
from faser.errors import RequestError
from faser.logs import begin, bind

_log = logging.getLogger("faser.api")

REQUEST_ID_HEADER = "X-Request-Id"
_MAX_ID_LENGTH = 256


def get_request_id(scope: Scope) -> str:
    request_id: str = scope["state"]["request_id"]
    return request_id


def set_request_id(scope: Scope, request_id: str, param: str) -> None:
    """Replace the id. Raises RequestError for an id that is not fit for a header or is too long for a log."""
    printable = request_id.isascii() and request_id.isprintable() and request_id.strip() == request_id
    if not printable or not 1 <= len(request_id) <= _MAX_ID_LENGTH:
        raise RequestError(
            f"{param} is {request_id[:80]!r}; it must be 1 to {_MAX_ID_LENGTH} printable ASCII characters",
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
            await error_response(HttpError(400, str(error), param=error.param))(scope, receive, send_with_id)
        except Exception:
            request_id = get_request_id(scope)
            _log.exception("request %s failed", request_id)
            if started:
                raise  # closes the connection: the client must not take half an answer for a whole one
            await error_response(internal_error(request_id))(scope, receive, send_with_id)
