"""Server-sent events as OpenAI frames them: data lines only, the last one [DONE].

Source of the framing: WHATWG HTML, section 9.2 (server-sent events).
"""

from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from faser.api.serving.disconnect import while_connected

DONE = b"data: [DONE]\n\n"

# Proxies must forward each event at once.
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

_encode = msgspec.json.Encoder().encode


def event(payload: Any) -> bytes:
    """One event: a value as JSON on one line, and an empty line."""
    return b"data: " + _encode(payload) + b"\n\n"


class ChunkWriter:
    """Writes the chunks of one answer. Encodes the fields that all chunks share only once.

    envelope: the fields around `choices`. with_usage: every chunk has a usage field.
    """

    def __init__(self, envelope: dict[str, Any], *, with_usage: bool) -> None:
        self._head = b"data: " + _encode(envelope)[:-1] + b',"choices":'
        self._no_usage = b',"usage":null}\n\n' if with_usage else b"}\n\n"

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        """usage: None writes null, or no field if the stream has no usage."""
        tail = self._no_usage if usage is None else b',"usage":' + _encode(usage) + b"}\n\n"
        return self._head + _encode(choices) + tail

    def last(self, fields: dict[str, Any]) -> bytes:
        """The chunk without choices that ends an answer. fields: its own fields, usage first."""
        return self._head + b"[]," + _encode(fields)[1:] + b"\n\n"


class EventStream(StreamingResponse):
    """Sends events until they end or the client disconnects; either closes their generator at once."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        """first: the first events, already taken from the generator. rest: the generator."""
        super().__init__(_after(first, rest), media_type="text/event-stream", headers=_HEADERS)
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        try:
            with suppress(ClientDisconnect):
                await while_connected(self.stream_response(send), receive)
        finally:
            await self._rest.aclose()


async def _after(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    async for events in rest:
        yield events
