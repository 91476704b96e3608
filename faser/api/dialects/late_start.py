"""LateStart: the answer of a stream whose model has yet to be loaded.

It begins while the client waits: with comments, which clients skip, and which keep proxies from giving up. Then
the answer of the model's application follows. An error comes too late for a status and is written as the event
with which the route ends a stream.
"""

from http import HTTPStatus
from typing import Any

import msgspec
from starlette.types import Message, Scope, Send

from faser.api.answers.handler import STREAM_HEADERS
from faser.api.bodies.errors import HttpError, error_body, messages_error_body
from faser.api.bodies.openapi import speaks_messages
from faser.api.dialects.conversion import typed_event
from faser.api.middleware.outer import get_request_id
from faser.api.middleware.tracing import trace_of

_RESPONSES = "/v1/responses"


class LateStart:
    """The `send` of one request. Until `begin` it hands messages on. route: of the request."""

    def __init__(self, scope: Scope, route: str, send: Send) -> None:
        self._scope = scope
        self._route = route
        self._send = send
        self.begun = False
        self._error_status: int | None = None
        self._error = b""

    async def begin(self, event: bytes) -> None:
        """Send an event, or a comment, before the answer; the first one begins the stream."""
        if not self.begun:
            self.begun = True
            headers = {"content-type": "text/event-stream; charset=utf-8", **STREAM_HEADERS}
            raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
            await self._send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": raw})
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def fail(self, error: HttpError) -> None:
        """End a stream that has begun."""
        if speaks_messages(self._route):
            body = messages_error_body(error.status, error.message, get_request_id(self._scope))
        else:
            body = error_body(error.status, error.message, error.param)
        await self._end(error.status, body)

    async def __call__(self, message: Message) -> None:
        if not self.begun:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._error_status = None if message["status"] == HTTPStatus.OK else message["status"]
        elif self._error_status is None:
            await self._send(message)
        else:
            self._error += message.get("body", b"")
            if not message.get("more_body", False):
                await self._end(self._error_status, msgspec.json.decode(self._error))

    async def _end(self, status: int, body: dict[str, Any]) -> None:
        """body: of an answer with this status, in the form of the route's errors."""
        if (trace := trace_of(self._scope)) is not None:
            trace.late_status = status
        if speaks_messages(self._route):
            event = typed_event(body)
        elif self._route == _RESPONSES:
            fields = {name: body["error"][name] for name in ("code", "message", "param")}
            event = typed_event({"type": "error", "sequence_number": 0, **fields, "code": str(fields["code"])})
        else:
            event = b"data: " + msgspec.json.encode(body) + b"\n\ndata: [DONE]\n\n"
        await self._send({"type": "http.response.body", "body": event, "more_body": False})
